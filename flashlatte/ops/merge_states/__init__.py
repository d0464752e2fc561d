"""Partial attention results over disjoint keys into one."""

from flashlatte.ops.merge_states.api import merge_attn_states, merge_states

__all__ = ["merge_attn_states", "merge_states"]
