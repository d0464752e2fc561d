"""Tokens of several requests out of a paged cache, dequantised."""

from flashlatte.ops.cache_gather.api import cache_gather, gather_last

__all__ = ["cache_gather", "gather_last"]
