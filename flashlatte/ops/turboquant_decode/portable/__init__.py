"""``turboquant_decode`` in Triton."""

from flashlatte.ops.turboquant_decode.portable.launch import turboquant_decode

__all__ = ["turboquant_decode"]
