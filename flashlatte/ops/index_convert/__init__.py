"""Conversion of token positions to slots of a paged cache."""

from flashlatte.ops.index_convert.api import index_convert, to_cache_indices

__all__ = ["index_convert", "to_cache_indices"]
