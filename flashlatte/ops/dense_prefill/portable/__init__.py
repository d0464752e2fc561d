"""Dense prefill in Triton, forward and backward."""

from flashlatte.ops.dense_prefill.portable.launch import backward, forward

__all__ = ["backward", "forward"]
