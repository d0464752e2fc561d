"""Attention of many queries over selected tokens of a contiguous latent."""

from flashlatte.ops.sparse_prefill.api import sparse_prefill

__all__ = ["sparse_prefill"]
