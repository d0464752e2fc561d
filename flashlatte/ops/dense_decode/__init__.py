"""Attention of few queries over a paged latent cache."""

from flashlatte.ops.dense_decode.api import dense_decode

__all__ = ["dense_decode"]
