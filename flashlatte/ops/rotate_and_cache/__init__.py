"""Queries normalised and rotated, keys rotated and written into their cache, in one launch."""

from flashlatte.ops.rotate_and_cache.api import rotate_and_cache

__all__ = ["rotate_and_cache"]
