"""Token positions of requests as slots of a paged cache."""

from flashlatte.ops.index_convert.api import to_cache_indices

__all__ = ["to_cache_indices"]
