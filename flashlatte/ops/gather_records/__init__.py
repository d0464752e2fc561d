"""Gather of the token records of several requests from a paged cache, without conversion."""

from flashlatte.ops.gather_records.api import gather_records

__all__ = ["gather_records"]
