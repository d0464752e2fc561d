"""Concatenation of the two parts of absorbed queries."""

from flashlatte.ops.concat_mla_q.api import concat_mla_q

__all__ = ["concat_mla_q"]
