"""Index keys into their paged cache, quantised, and back out of it."""

from flashlatte.ops.index_quantize.api import index_gather, index_quantize

__all__ = ["index_gather", "index_quantize"]
