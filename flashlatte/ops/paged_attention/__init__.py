"""Attention over a paged cache of keys and values: decode, prefill, and mixed batches."""

from flashlatte.ops.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
