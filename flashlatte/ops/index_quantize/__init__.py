"""Quantized write of index keys to their paged cache, and gather from it."""

from flashlatte.ops.index_quantize.api import index_gather, index_quantize

__all__ = ["index_gather", "index_quantize"]
