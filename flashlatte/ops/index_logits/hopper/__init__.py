"""Index logits in Gluon, for SM90: docs/kernels/index-logits.md explains the schedule."""

from flashlatte.ops.index_logits.hopper.launch import paged, ragged

__all__ = ["paged", "ragged"]
