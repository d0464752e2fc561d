"""Requests of many queries in Gluon, and those of few in Triton, which splits their keys over CTAs.

Which is which each kernel reads on the device: a call is the same for all lengths.
"""

from __future__ import annotations

from flashlatte.ops.paged_attention.arguments import PagedAttentionArgs
from flashlatte.ops.paged_attention.hopper.launch import attend_long
from flashlatte.ops.paged_attention.portable.launch import attend

# Query rows of a request (its tokens times the query heads of a key head) up to which it is short: two tiles of the
# portable kernel for decode, a quarter of a tile of the other.
_SHORT_ROWS = 32


def paged_attention(args: PagedAttentionArgs) -> None:
    if args.cu_seqlens_q.shape[0] == 2:
        attend_long(args, fewest=0)
        return
    heads = args.q.shape[1] // args.k_cache.shape[2]
    short = max(_SHORT_ROWS // heads, 1)
    attend_long(args, fewest=short + 1)
    attend(args, most_queries=short)
