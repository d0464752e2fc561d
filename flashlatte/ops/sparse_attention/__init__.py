"""Attention over selected tokens of a contiguous latent, with gradients: the training form of sparse prefill."""

from flashlatte.ops.sparse_attention.api import sparse_attention

__all__ = ["sparse_attention"]
