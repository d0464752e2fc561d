"""``gather_records`` in Triton: one launch per plane of a page."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import (
    RequestPages,
    Requests,
    end_of_rows,
    locate_rows,
    pages_of,
    requests_of,
)
from flashlatte.kernels.triton.cache_layout import as_bytes
from flashlatte.kernels.triton.row_copy import NUM_WARPS, row_copy, strides_in_units, tile_of_words, words_at
from flashlatte.kernels.triton.rows import CacheRows, TokenRows
from flashlatte.ops.gather_records.reference import GatherRecordsParams
from flashlatte.runtime.triton_kernel import kernel

ROWS = 32


def gather_records(params: GatherRecordsParams) -> None:
    first = 0
    for plane in params.layout.page_views(params.cache):
        width = plane.shape[2]
        _gather_plane(params, plane, params.out[:, first : first + width])
        first += width


def _gather_plane(params: GatherRecordsParams, plane: torch.Tensor, out: torch.Tensor) -> None:
    """Gather the rows of a plane [pages, page_size, width] to [rows, width]."""
    num_pages, page_size, width = plane.shape
    table = params.block_table
    copy = row_copy(width * plane.element_size(), ROWS, plane, out)
    gather_records_kernel[copy.grid(out.shape[0])](
        CacheRows(as_bytes(plane), *strides_in_units(copy, plane), copy.unit),
        requests_of(params.cu_seqlens, table.shape[0], params.seq_starts),
        pages_of(table, num_pages, page_size),
        TokenRows(as_bytes(out), *strides_in_units(copy, out), copy.unit),
        num_rows=out.shape[0],
        COPY=copy,
        WIDE=table.shape[1] * page_size >= 2**31,
        num_warps=NUM_WARPS,
    )


@kernel
def gather_records_kernel(
    plane: CacheRows,
    requests: Requests,
    pages: RequestPages,
    out: TokenRows,
    num_rows: tl.int64,
    COPY: tl.constexpr,
    WIDE: tl.constexpr,
):
    first_row, word, in_row = tile_of_words(COPY)
    if first_row >= end_of_rows(requests, num_rows):
        return
    rows = first_row + tl.arange(0, COPY.block_rows)
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    source = words_at(plane.start, page * plane.page_stride + offset * plane.row_stride, plane.align)
    target = words_at(out.start, rows * out.stride, out.align)
    # [block_rows, block_words]
    words = tl.load(source[:, None] + word, mask=found[:, None] & in_row, other=0)
    tl.store(target[:, None] + word, words, mask=inside[:, None] & in_row)
