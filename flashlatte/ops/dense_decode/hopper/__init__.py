"""Dense decode in Gluon, for SM90."""

from flashlatte.ops.dense_decode.hopper.launch import dense_decode

__all__ = ["dense_decode"]
