"""Paged latent caches: named formats and all that reads or writes their bytes."""

from flashlatte.kv_cache.codec import allocate, dequantize, pack, quantize, unpack
from flashlatte.kv_cache.formats import CacheFormat, Plane
from flashlatte.kv_cache.pages import copy_blocks, swap_blocks, to_cache_indices
from flashlatte.kv_cache.registry import FORMAT_NAMES, infer_format
from flashlatte.kv_cache.registry import as_format as get_format
from flashlatte.kv_cache.tokens import gather, read, write

__all__ = [
    "FORMAT_NAMES",
    "CacheFormat",
    "Plane",
    "allocate",
    "copy_blocks",
    "dequantize",
    "gather",
    "get_format",
    "infer_format",
    "pack",
    "quantize",
    "read",
    "swap_blocks",
    "to_cache_indices",
    "unpack",
    "write",
]
