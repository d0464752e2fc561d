"""Sparse prefill in Triton, for all GPUs that Triton supports, and for the CPU in Triton's interpreter."""

from flashlatte.ops.sparse_prefill.by_token import sparse_prefill

__all__ = ["sparse_prefill"]
