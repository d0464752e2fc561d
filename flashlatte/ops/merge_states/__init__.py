"""Merge of attention results over disjoint keys."""

from flashlatte.ops.merge_states.api import merge_attn_states, merge_states

__all__ = ["merge_attn_states", "merge_states"]
