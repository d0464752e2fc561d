"""Sparse prefill in Gluon for Hopper (SM90): docs/kernels/sparse-prefill.md explains the schedule."""

from flashlatte.ops.sparse_prefill.hopper.launch import sparse_prefill

__all__ = ["sparse_prefill"]
