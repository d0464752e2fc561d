"""Backward of dense prefill in Gluon for Hopper (SM90): docs/kernels/dense-prefill-backward.md explains the schedule."""

from flashlatte.ops.dense_prefill.hopper.backward.launch import backward

__all__ = ["backward"]
