"""Gather of the tokens of several requests from a paged cache, dequantized."""

from flashlatte.ops.cache_gather.api import cache_gather, gather_last

__all__ = ["cache_gather", "gather_last"]
