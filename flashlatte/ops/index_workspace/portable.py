"""``index_workspace`` in Triton: one program per token."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from flashlatte.kernels.triton.cache_address import Requests, request_of_row, requests_of
from flashlatte.kernels.triton.rows import TokenRows, token_row, token_rows
from flashlatte.ops.index_workspace.reference import IndexWorkspaceParams
from flashlatte.runtime.kernel_records import ElementPointer, Int64
from flashlatte.runtime.strides import first_stride
from flashlatte.runtime.triton_kernel import kernel

BLOCK, WARPS = 512, 4


class GatheredLengths(NamedTuple):
    """The tokens of each request, and how many of its last ones are gathered; None: all."""

    seq_lens: ElementPointer
    stride: Int64
    gather_lens: ElementPointer
    gather_stride: Int64


class WorkspaceLayout(NamedTuple):
    """The keys that a token attends to (up to ``topk`` groups of ``ratio`` tokens, and a window), and their positions
    among the ``rows`` of its request."""

    topk: Int64
    window: Int64
    ratio: Int64
    rows: Int64
    window_row: Int64


def index_workspace(params: IndexWorkspaceParams) -> None:
    rows, seq_lens, gather_lens = params.rows, params.seq_lens, params.gather_lens
    index_workspace_kernel[(rows.shape[0],)](
        requests_of(params.cu_seqlens_q, seq_lens.shape[0], None),
        GatheredLengths(seq_lens, seq_lens.stride(0), gather_lens, first_stride(gather_lens)),
        WorkspaceLayout(params.topk, params.window, params.ratio, params.workspace_rows, params.window_row),
        token_rows(params.indices, align=1),
        rows=rows,
        counts=params.counts,
        width=rows.shape[1],
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@kernel
def index_workspace_kernel(
    requests: Requests,
    lengths: GatheredLengths,
    layout: WorkspaceLayout,
    indices: TokenRows,
    rows,
    counts,
    width: tl.int64,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(requests.cu_seqlens).to(tl.int64)
    request, _ = request_of_row(requests, token + first)
    known = request >= 0
    request = tl.where(known, request, 0)
    # At least 0, so that no difference wraps round.
    length = tl.maximum(tl.load(lengths.seq_lens + request * lengths.stride).to(tl.int64), 0)
    end = tl.load(requests.cu_seqlens + (request + 1) * requests.cu_stride).to(tl.int64) - first
    position = length - end + token
    known = known & (position >= 0)
    gathered = length
    if lengths.gather_lens is not None:
        gathered = tl.load(lengths.gather_lens + request * lengths.gather_stride).to(tl.int64)

    groups = tl.where(known, tl.minimum((position + 1) // layout.ratio, layout.topk), 0)
    seen = tl.where(known, tl.minimum(position + 1, layout.window), 0)
    tl.store(counts + token, (groups + seen).to(tl.int32))
    for block in range(0, width, BLOCK):
        column = block + tl.arange(0, BLOCK)
        selects = column < groups
        chosen = column.to(tl.int64)
        if indices.start is not None:
            chosen = tl.load(token_row(indices, token) + column, mask=selects, other=-1).to(tl.int64)
        recent = position + 1 - seen + (column - groups)
        at = recent - (length - gathered)
        valid = tl.where(selects, chosen >= 0, (column < groups + seen) & (at >= 0))
        workspace_row = tl.where(selects, chosen, layout.window_row + at)
        valid = valid & (workspace_row < layout.rows)
        row = request * layout.rows + workspace_row
        row = tl.where(valid & (row <= 0x7FFFFFFF), row, -1).to(tl.int32)
        tl.store(rows + token * width + column, row, mask=column < width)
