"""Sparse prefill in Triton, for any GPU that it serves, and for the CPU through its interpreter."""

from flashlatte.ops.sparse_prefill.by_token import sparse_prefill

__all__ = ["sparse_prefill"]
