"""Scores of index queries against index keys: contiguous, paged, or the candidate blocks of either."""

from flashlatte.ops.index_logits.api import index_logits, paged_index_logits
from flashlatte.ops.index_logits.sparse import sparse_index_logits

__all__ = ["index_logits", "paged_index_logits", "sparse_index_logits"]
