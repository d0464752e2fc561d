"""Rotation of new tokens and their write to a paged latent cache, in one launch."""

from flashlatte.ops.rope_cache_write.api import rope_cache_write

__all__ = ["rope_cache_write"]
