"""Paged attention in Triton."""

from flashlatte.ops.paged_attention.portable.launch import paged_attention

__all__ = ["paged_attention"]
