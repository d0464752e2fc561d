"""``compress`` in Triton."""

from flashlatte.ops.compress.portable.launch import compress

__all__ = ["compress"]
