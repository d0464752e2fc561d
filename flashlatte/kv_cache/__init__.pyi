from flashlatte.kv_cache.codec import allocate as allocate
from flashlatte.kv_cache.codec import dequantize as dequantize
from flashlatte.kv_cache.codec import pack as pack
from flashlatte.kv_cache.codec import quantize as quantize
from flashlatte.kv_cache.codec import unpack as unpack
from flashlatte.kv_cache.formats import CacheFormat as CacheFormat
from flashlatte.kv_cache.formats import Plane as Plane
from flashlatte.kv_cache.registry import FORMAT_NAMES as FORMAT_NAMES
from flashlatte.kv_cache.registry import as_format as get_format
from flashlatte.kv_cache.registry import infer_format as infer_format
from flashlatte.kv_cache.slots import read as read
from flashlatte.ops.cache_copy import copy_blocks as copy_blocks
from flashlatte.ops.cache_copy import swap_blocks as swap_blocks
from flashlatte.ops.cache_gather import cache_gather as gather
from flashlatte.ops.cache_gather import gather_last as gather_last
from flashlatte.ops.cache_write import cache_write as write
from flashlatte.ops.gather_records import gather_records as gather_records
from flashlatte.ops.index_convert import to_cache_indices as to_cache_indices
from flashlatte.ops.rope_cache_write import rope_cache_write as rope_write

__all__ = [
    "FORMAT_NAMES",
    "CacheFormat",
    "Plane",
    "allocate",
    "copy_blocks",
    "dequantize",
    "gather",
    "gather_last",
    "gather_records",
    "get_format",
    "infer_format",
    "pack",
    "quantize",
    "read",
    "rope_write",
    "swap_blocks",
    "to_cache_indices",
    "unpack",
    "write",
]
