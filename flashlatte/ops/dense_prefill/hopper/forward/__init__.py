"""Forward of variable-length attention in Gluon, for SM90: docs/kernels/dense-prefill.md explains the schedule."""

from flashlatte.ops.dense_prefill.hopper.forward.launch import forward

__all__ = ["forward"]
