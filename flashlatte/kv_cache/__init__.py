"""Paged latent caches: formats, allocation, reading and writing.

``write``, ``rope_write``, ``gather``, ``gather_last``, ``gather_records``, ``copy_blocks``, ``swap_blocks`` and
``to_cache_indices`` are defined in ``flashlatte.ops``.
"""

from flashlatte.kv_cache.codec import allocate, dequantize, pack, quantize, unpack
from flashlatte.kv_cache.formats import CacheFormat, Plane
from flashlatte.kv_cache.registry import FORMAT_NAMES, infer_format
from flashlatte.kv_cache.registry import as_format as get_format
from flashlatte.kv_cache.slots import read
from flashlatte.runtime import lazy

__all__ = [
    "FORMAT_NAMES",
    "CacheFormat",
    "Plane",
    "allocate",
    "dequantize",
    "get_format",
    "infer_format",
    "pack",
    "quantize",
    "read",
    "unpack",
]

__getattr__, __dir__ = lazy.attach(__name__)
