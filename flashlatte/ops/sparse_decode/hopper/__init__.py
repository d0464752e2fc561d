"""Sparse decode in Gluon for Hopper (SM90): docs/kernels/sparse-decode.md explains the schedule."""

from flashlatte.ops.sparse_decode.hopper.launch import sparse_decode

__all__ = ["sparse_decode"]
