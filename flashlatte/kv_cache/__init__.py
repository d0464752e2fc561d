"""Paged latent caches: formats, allocation, reading and writing.

``write``, ``rope_write``, ``gather``, ``gather_last``, ``gather_records``, ``copy_blocks``, ``swap_blocks`` and
``to_cache_indices`` are defined in ``flashlatte.ops``.
"""

from typing import TYPE_CHECKING

from flashlatte.runtime import lazy

if TYPE_CHECKING:
    from flashlatte.kv_cache.codec import allocate, dequantize, pack, quantize, unpack
    from flashlatte.kv_cache.formats import CacheFormat, Plane
    from flashlatte.kv_cache.registry import FORMAT_NAMES, infer_format
    from flashlatte.kv_cache.registry import as_format as get_format
    from flashlatte.kv_cache.slots import read

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

lazy.declare(
    __name__,
    {
        "FORMAT_NAMES": "flashlatte.kv_cache.registry:FORMAT_NAMES",
        "CacheFormat": "flashlatte.kv_cache.formats:CacheFormat",
        "Plane": "flashlatte.kv_cache.formats:Plane",
        "allocate": "flashlatte.kv_cache.codec:allocate",
        "dequantize": "flashlatte.kv_cache.codec:dequantize",
        "get_format": "flashlatte.kv_cache.registry:as_format",
        "infer_format": "flashlatte.kv_cache.registry:infer_format",
        "pack": "flashlatte.kv_cache.codec:pack",
        "quantize": "flashlatte.kv_cache.codec:quantize",
        "read": "flashlatte.kv_cache.slots:read",
        "unpack": "flashlatte.kv_cache.codec:unpack",
    },
)
__getattr__, __dir__ = lazy.attach(__name__)
