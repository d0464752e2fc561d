"""The Hopper backend: requests with many queries run in Gluon, those with few in Triton, which splits keys over CTAs.

Each kernel selects its requests on the device, so the launches do not depend on the lengths.
"""

from __future__ import annotations

from flashlatte.ops.paged_attention.hopper.launch import attend_long
from flashlatte.ops.paged_attention.portable.launch import attend
from flashlatte.ops.paged_attention.reference import PagedAttentionParams

# Maximum query rows of a short request (its tokens times the query heads per key head): two decode tiles of the
# portable kernel, a quarter of a tile of the Gluon kernel.
_SHORT_ROWS = 32


def paged_attention(params: PagedAttentionParams) -> None:
    if params.cu_seqlens_q.shape[0] == 2:
        attend_long(params, min_queries=0)
        return
    heads = params.q.shape[1] // params.k_cache.shape[2]
    short = max(_SHORT_ROWS // heads, 1)
    attend_long(params, min_queries=short + 1)
    attend(params, max_queries=short)
