"""Sparse decode in Triton."""

from flashlatte.ops.sparse_decode.portable.launch import sparse_decode

__all__ = ["sparse_decode"]
