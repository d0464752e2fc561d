"""Dense decode in Triton."""

from flashlatte.ops.dense_decode.portable.launch import dense_decode

__all__ = ["dense_decode"]
