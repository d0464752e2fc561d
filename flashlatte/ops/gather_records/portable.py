"""``gather_records`` in Triton: one launch per plane of a page."""

from __future__ import annotations

import math

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
from flashlatte.kernels.triton.cache_layout import Blocking, alignment_bytes, as_bytes, cdiv
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.runtime.arguments import by_name
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

BLOCKING = Blocking(tokens=32, warps=4)
BLOCK_BYTES = 256


def gather_records(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    layout: CacheFormat,
    out: torch.Tensor,
) -> None:
    first = 0
    for plane in layout.page_views(cache):
        width = plane.shape[2]
        _gather_plane(plane, block_table, cu_seqlens, seq_starts, out[:, first : first + width])
        first += width


def _gather_plane(
    plane: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Gather the rows of a plane [pages, page_size, width] to [rows, width]."""
    size = plane.element_size()
    num_pages, page_size, width = plane.shape
    page_stride, row_stride = (stride_in_use(plane, axis) * size for axis in (0, 1))
    out_stride = stride_in_use(out, 0) * size
    unit = math.gcd(alignment_bytes(plane), alignment_bytes(out), page_stride, row_stride, out_stride, width * size)
    column_blocks = cdiv(width * size, BLOCK_BYTES)
    gather_records_kernel[(cdiv(out.shape[0], BLOCKING.tokens) * column_blocks,)](
        *by_name(
            gather_records_kernel,
            requests_of(cu_seqlens, block_table.shape[0], seq_starts),
            pages_of(block_table, num_pages, page_size),
            out=as_bytes(out),
            plane=as_bytes(plane),
            num_rows=out.shape[0],
            page_stride=page_stride // unit,
            row_stride=row_stride // unit,
            out_stride=out_stride // unit,
        ),
        WIDTH=width * size // unit,
        ALIGN=unit,
        WIDE=block_table.shape[1] * page_size >= 2**31,
        BLOCK_T=BLOCKING.tokens,
        BLOCK_BYTES=BLOCK_BYTES,
        num_warps=BLOCKING.warps,
    )


@kernel(by_element=("cu_seqlens", "seq_starts"))
def gather_records_kernel(
    out,
    plane,
    cu_seqlens,
    cu_stride: tl.int64,
    num_boundaries: tl.int64,
    num_requests: tl.int64,
    seq_starts,
    start_stride: tl.int64,
    block_table,
    table_stride: tl.int64,
    max_pages: tl.int64,
    num_pages: tl.int64,
    page_size: tl.int64,
    num_rows: tl.int64,
    page_stride: tl.int64,
    row_stride: tl.int64,
    out_stride: tl.int64,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Copy BLOCK_BYTES of BLOCK_T rows. WIDTH and strides are in units of ALIGN bytes."""
    WORD_BYTES: tl.constexpr = 4 if ALIGN >= 4 else 1
    WORD: tl.constexpr = tl.uint32 if ALIGN >= 4 else tl.uint8
    WORDS: tl.constexpr = ALIGN // WORD_BYTES
    BLOCK: tl.constexpr = BLOCK_BYTES // WORD_BYTES
    column_blocks: tl.constexpr = (WIDTH * WORDS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    first_row = (program // column_blocks).to(tl.int64) * BLOCK_T
    requests = Requests(cu_seqlens, cu_stride, num_boundaries, num_requests, seq_starts, start_stride)
    pages = RequestPages(block_table, table_stride, max_pages, num_pages, page_size)
    if first_row >= end_of_rows(requests, num_rows):
        return
    rows = first_row + tl.arange(0, BLOCK_T)
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    word = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_row = word < WIDTH * WORDS
    source = plane.to(tl.pointer_type(WORD)) + (page * page_stride + offset * row_stride) * WORDS
    target = out.to(tl.pointer_type(WORD)) + rows * out_stride * WORDS
    # [BLOCK_T, BLOCK]
    words = tl.load(source[:, None] + word, mask=found[:, None] & in_row, other=0)
    tl.store(target[:, None] + word, words, mask=inside[:, None] & in_row)
