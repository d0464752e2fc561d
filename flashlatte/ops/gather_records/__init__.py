"""The bytes of several requests' tokens out of a paged cache, as they are."""

from flashlatte.ops.gather_records.api import gather_records

__all__ = ["gather_records"]
