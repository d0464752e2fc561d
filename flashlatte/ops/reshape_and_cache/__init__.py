"""Write of new keys and values to a paged cache, quantized to its dtype."""

from flashlatte.ops.reshape_and_cache.api import reshape_and_cache

__all__ = ["reshape_and_cache"]
