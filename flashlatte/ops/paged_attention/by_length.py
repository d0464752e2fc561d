"""Requests of many queries in Gluon, and those of few in Triton, which splits their keys over CTAs.

Which is which each kernel reads on the device: a call is the same for all lengths.
"""

from __future__ import annotations

from flashlatte.ops.paged_attention.hopper.launch import attend_long
from flashlatte.ops.paged_attention.portable.launch import attend
from flashlatte.ops.paged_attention.problem import Problem

# Query rows of a request (its tokens times the query heads of a key head) up to which it is short: two tiles of the
# portable kernel for decode, a quarter of a tile of the other.
_SHORT_ROWS = 32


def paged_attention(problem: Problem) -> None:
    if problem.cu_seqlens_q.shape[0] == 2:
        attend_long(problem, min_queries=0)
        return
    heads = problem.q.shape[1] // problem.k_cache.shape[2]
    short = max(_SHORT_ROWS // heads, 1)
    attend_long(problem, min_queries=short + 1)
    attend(problem, most_queries=short)
