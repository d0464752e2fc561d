"""``index_workspace`` in Triton: one program per token."""

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Requests, request_of_row
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

BLOCK, WARPS = 512, 4


def index_workspace(
    indices: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    topk: int,
    window: int,
    ratio: int,
    workspace_rows: int,
    window_row: int,
    rows: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    index_workspace_kernel[(rows.shape[0],)](
        indices=indices,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        gather_lens=gather_lens,
        rows=rows,
        counts=counts,
        requests=seq_lens.shape[0],
        topk=topk,
        window=window,
        ratio=ratio,
        workspace_rows=workspace_rows,
        window_row=window_row,
        width=rows.shape[1],
        index_stride=0 if indices is None else stride_in_use(indices, 0),
        cu_stride=cu_seqlens_q.stride(0),
        length_stride=seq_lens.stride(0),
        gather_stride=0 if gather_lens is None else gather_lens.stride(0),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@kernel(by_element=("cu_seqlens_q", "seq_lens", "gather_lens"))
def index_workspace_kernel(
    indices,
    cu_seqlens_q,
    seq_lens,
    gather_lens,
    rows,
    counts,
    requests: tl.int64,
    topk: tl.int64,
    window: tl.int64,
    ratio: tl.int64,
    workspace_rows: tl.int64,
    window_row: tl.int64,
    width: tl.int64,
    index_stride: tl.int64,
    cu_stride: tl.int64,
    length_stride: tl.int64,
    gather_stride: tl.int64,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_seqlens_q).to(tl.int64)
    spans = Requests(cu_seqlens_q, cu_stride, requests + 1, requests)
    request, _ = request_of_row(spans, token + first)
    known = request >= 0
    request = tl.where(known, request, 0)
    length = tl.load(seq_lens + request * length_stride).to(tl.int64)
    end = tl.load(cu_seqlens_q + (request + 1) * cu_stride).to(tl.int64) - first
    position = length - end + token
    known = known & (position >= 0)
    gathered = length if gather_lens is None else tl.load(gather_lens + request * gather_stride).to(tl.int64)

    groups = tl.where(known, tl.minimum((position + 1) // ratio, topk), 0)
    seen = tl.where(known, tl.minimum(position + 1, window), 0)
    tl.store(counts + token, (groups + seen).to(tl.int32))
    for block in range(0, width, BLOCK):
        column = block + tl.arange(0, BLOCK)
        selects = column < groups
        chosen = column.to(tl.int64)
        if indices is not None:
            chosen = tl.load(indices + token * index_stride + column, mask=selects, other=-1).to(tl.int64)
        recent = position + 1 - seen + (column - groups)
        at = recent - (length - gathered)
        valid = tl.where(selects, chosen >= 0, (column < groups + seen) & (at >= 0))
        workspace_row = tl.where(selects, chosen, window_row + at)
        valid = valid & (workspace_row < workspace_rows)
        row = request * workspace_rows + workspace_row
        row = tl.where(valid & (row <= 0x7FFFFFFF), row, -1).to(tl.int32)
        tl.store(rows + token * width + column, row, mask=column < width)
