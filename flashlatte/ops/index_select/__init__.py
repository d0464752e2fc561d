"""Selection of each query's keys: index logits and their top-k in one call."""

from flashlatte.ops.index_select.api import index_select, paged_index_select

__all__ = ["index_select", "paged_index_select"]
