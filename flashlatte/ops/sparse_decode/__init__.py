"""Attention of few queries over selected tokens of a paged cache."""

from flashlatte.ops.sparse_decode.api import sparse_decode

__all__ = ["sparse_decode"]
