"""Copies of whole pages within a cache and between caches, on a GPU or in host memory."""

from flashlatte.ops.cache_copy.api import copy_blocks, swap_blocks

__all__ = ["copy_blocks", "swap_blocks"]
