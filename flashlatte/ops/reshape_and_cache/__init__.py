"""New keys and values into pages, quantised to the cache's dtype."""

from flashlatte.ops.reshape_and_cache.api import reshape_and_cache

__all__ = ["reshape_and_cache"]
