"""Scores of index queries against index keys, contiguous or paged."""

from flashlatte.ops.index_logits.api import index_logits, paged_index_logits

__all__ = ["index_logits", "paged_index_logits"]
