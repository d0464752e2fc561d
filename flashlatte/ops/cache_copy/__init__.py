"""Whole pages, copied within a cache or moved between caches."""

from flashlatte.ops.cache_copy.api import copy_blocks, swap_blocks

__all__ = ["copy_blocks", "swap_blocks"]
