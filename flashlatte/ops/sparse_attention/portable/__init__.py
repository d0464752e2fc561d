"""The backward pass of sparse attention in Triton."""

from flashlatte.ops.sparse_attention.portable.launch import backward

__all__ = ["backward"]
