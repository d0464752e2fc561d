"""Many queries over keys and values of variable length, in multi-head form, forward and backward."""

from flashlatte.ops.dense_prefill.api import dense_prefill

__all__ = ["dense_prefill"]
