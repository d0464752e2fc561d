"""``cache_gather`` from formats with contiguous tokens of e4m3 or e2m1 values and a scale byte per block."""

from __future__ import annotations

import triton.language as tl

from flashlatte.kernels.triton.cache_address import RequestPages, Requests, end_of_rows, locate_rows
from flashlatte.kernels.triton.fp4 import e2m1_to_float
from flashlatte.kernels.triton.fp8 import e4m3_to_float, e8m0_to_float, from_float32
from flashlatte.runtime.triton_kernel import kernel


@kernel(by_element=("block_table", "cu_seqlens", "seq_starts", "seq_ends"))
def gather_blocks_kernel(
    out,
    cache,
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
    seq_ends,
    end_stride: tl.int64,
    num_rows: tl.int64,
    page_stride: tl.int64,
    out_stride: tl.int64,
    SCALING: tl.constexpr,
    TAIL: tl.constexpr,
    ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The TAIL of a row has no scale. ``page_stride`` counts ALIGN bytes, ``out_stride`` OUT_ALIGN elements."""
    SCALED: tl.constexpr = SCALING.block * SCALING.blocks
    VALUE_BYTES: tl.constexpr = SCALED // 2 if SCALING.fp4 else SCALED
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = first_row + tl.arange(0, BLOCK_T)
    requests = Requests(
        cu_seqlens, cu_stride, num_boundaries, num_requests, seq_starts, start_stride, seq_ends, end_stride
    )
    pages = RequestPages(block_table, table_stride, max_pages, num_pages, page_size)
    if first_row >= end_of_rows(requests, num_rows):
        return
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    row = (cache + page * page_stride * ALIGN + offset * SCALING.token_bytes)[:, None]
    found = found[:, None]

    block = tl.arange(0, SCALING.blocks)[None, :]
    scale_index = SCALING.blocks // SCALING.scale_lanes * (block % SCALING.scale_lanes) + block // SCALING.scale_lanes
    scale_bytes = tl.load(row + SCALING.scale_offset + scale_index, mask=found, other=0)  # [BLOCK_T, blocks]
    codes = tl.load(row + tl.arange(0, VALUE_BYTES)[None, :], mask=found, other=0)  # [BLOCK_T, VALUE_BYTES]
    if SCALING.fp4:
        pairs = codes.to(tl.int32)
        values = tl.reshape(tl.join(e2m1_to_float(pairs & 15), e2m1_to_float(pairs >> 4)), [BLOCK_T, SCALED])
        scales = e4m3_to_float(scale_bytes, NATIVE)
    else:
        values = e4m3_to_float(codes, NATIVE)
        scales = e8m0_to_float(scale_bytes)
    values = tl.reshape(values, [BLOCK_T, SCALING.blocks, SCALING.block]) * scales[:, :, None]

    OUT_TYPE: tl.constexpr = out.dtype.element_ty
    out_row = (out + rows * out_stride * OUT_ALIGN)[:, None]
    column = tl.arange(0, SCALED)[None, :]
    elements = from_float32(tl.reshape(values, [BLOCK_T, SCALED]), OUT_TYPE, INTERPRETED)
    tl.store(out_row + column, elements, mask=inside[:, None])
    if TAIL > 0:
        column = tl.arange(0, TAIL)[None, :]
        tail = tl.load(row + VALUE_BYTES + column, mask=found, other=0)  # [BLOCK_T, TAIL]
        elements = from_float32(e4m3_to_float(tail, NATIVE), OUT_TYPE, INTERPRETED)
        tl.store(out_row + SCALED + column, elements, mask=inside[:, None])
