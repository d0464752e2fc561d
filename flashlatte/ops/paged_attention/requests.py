"""The kernels' record of a call's requests."""

from __future__ import annotations

from typing import NamedTuple

from flashlatte.ops.paged_attention.reference import PagedAttentionParams
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64


class PagedAttentionRequests(NamedTuple):
    """The queries of each request, and its keys in pages.

    Attributes:
        cu_seqlens_q: first query of each request and the end of the last one, [count + 1].
        count: number of requests.
        total_q: rows of q.
        seqused_k, seqused_stride: keys of each request in its pages, clamped to 0 … ``capacity``.
    """

    cu_seqlens_q: ElementPointer
    count: Int32
    total_q: Int32
    seqused_k: ElementPointer
    seqused_stride: Int64
    capacity: Int32


def paged_requests(params: PagedAttentionParams) -> PagedAttentionRequests:
    """Make ``PagedAttentionRequests`` from the arguments of a call."""
    return PagedAttentionRequests(
        cu_seqlens_q=params.cu_seqlens_q,
        count=params.cu_seqlens_q.shape[0] - 1,
        total_q=params.q.shape[0],
        seqused_k=params.seqused_k,
        seqused_stride=params.seqused_k.stride(0),
        capacity=params.cached_keys,
    )
