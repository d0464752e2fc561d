"""Norm and rotation of queries, rotation of keys and their write to the cache, in one launch."""

from flashlatte.ops.rotate_and_cache.api import rotate_and_cache

__all__ = ["rotate_and_cache"]
