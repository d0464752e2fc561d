"""Write of new tokens to a paged cache, quantized to its format."""

from flashlatte.ops.cache_write.api import cache_write

__all__ = ["cache_write"]
