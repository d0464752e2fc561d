"""``cache_gather`` in Triton: copies the tokens of several requests to a contiguous latent and dequantises them."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import (
    RequestPages,
    Requests,
    end_of_rows,
    load_words,
    locate_rows,
    pages_of,
    requests_of,
)
from flashlatte.kernels.triton.cache_layout import Blocking, alignment_bytes, alignment_elements, as_bytes, cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3, e4m3_to_float, e8m0_to_float, from_float32, to_float32
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.ops.cache_gather.portable_blocks import gather_blocks_kernel
from flashlatte.runtime import machine
from flashlatte.runtime.arguments import by_name
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

TILED_BLOCKING = Blocking(tokens=4, warps=1)
ROWS_BLOCKING = Blocking(tokens=32, warps=4)
ROWS_COLUMNS = 64


def cache_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    layout: CacheFormat,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
    out: torch.Tensor,
    seq_ends: torch.Tensor | None = None,
) -> None:
    cache = as_bytes(cache)
    num_pages, page_size, _, width = cache.shape
    page_stride = stride_in_use(cache, 0)
    out_stride = stride_in_use(out, 0)
    out_align = alignment_elements(out, out_stride)
    num_rows = out.shape[0]
    requests = requests_of(cu_seqlens, block_table.shape[0], seq_starts, seq_ends)
    pages = pages_of(block_table, num_pages, page_size)
    rows = {"out": out, "num_rows": num_rows, "out_stride": out_stride // out_align}
    variant = {
        "OUT_ALIGN": out_align,
        "WIDE": block_table.shape[1] * page_size >= 2**31,
        "NATIVE": converts_e4m3(cache.device),
        "INTERPRETED": machine.interpreting(),
    }
    if layout.tiling is not None or layout.block_scaling is not None:
        gather, form = _scaled_form(layout)
        align = alignment_bytes(cache, page_stride)
        gather[(cdiv(num_rows, TILED_BLOCKING.tokens),)](
            *by_name(gather, requests, pages, cache=cache, page_stride=page_stride // align, **rows),
            **form,
            **variant,
            ALIGN=align,
            BLOCK_T=TILED_BLOCKING.tokens,
            num_warps=TILED_BLOCKING.warps,
        )
        return
    row_stride = stride_in_use(cache, 1)
    align = alignment_elements(cache, page_stride, row_stride)
    gather_rows_kernel[(cdiv(num_rows, ROWS_BLOCKING.tokens) * cdiv(width, ROWS_COLUMNS),)](
        *by_name(
            gather_rows_kernel,
            requests,
            pages,
            cache=cache,
            scale_tensor=scale_tensor,
            scale_value=scale_value,
            page_stride=page_stride // align,
            row_stride=row_stride // align,
            **rows,
        ),
        **variant,
        WIDTH=width,
        ALIGN=align,
        BLOCK_T=ROWS_BLOCKING.tokens,
        BLOCK_C=ROWS_COLUMNS,
        num_warps=ROWS_BLOCKING.warps,
    )


def _scaled_form(layout: CacheFormat) -> tuple[Any, dict[str, Any]]:
    """The kernel of a format with a scale per tile or block, and the format as its constants."""
    if layout.tiling is not None:
        return gather_tiles_kernel, {"TILING": layout.tiling}
    scaling = layout.block_scaling
    return gather_blocks_kernel, {"SCALING": scaling, "TAIL": layout.head_dim - scaling.block * scaling.blocks}


@kernel(by_element=("block_table", "cu_seqlens", "seq_starts", "seq_ends"))
def gather_tiles_kernel(
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
    TILING: tl.constexpr,
    ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Formats with a scale per tile. ``page_stride`` counts ALIGN bytes, ``out_stride`` OUT_ALIGN elements."""
    LATENT: tl.constexpr = TILING.tiles * TILING.tile
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = first_row + tl.arange(0, BLOCK_T)
    requests = Requests(
        cu_seqlens, cu_stride, num_boundaries, num_requests, seq_starts, start_stride, seq_ends, end_stride
    )
    pages = RequestPages(block_table, table_stride, max_pages, num_pages, page_size)
    if first_row >= end_of_rows(requests, num_rows):
        return
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    page_start = cache + page * page_stride * ALIGN
    row = page_start + offset * TILING.row_bytes

    tile = tl.arange(0, TILING.padded_tiles)[None, :]
    column = tile[:, :, None] * TILING.tile + tl.arange(0, TILING.tile)[None, None, :]
    rope_column = tl.arange(0, 64)[None, :]
    used = tile[:, :, None] < TILING.tiles
    # [BLOCK_T, padded_tiles, tile], [BLOCK_T, 64], [BLOCK_T, padded_tiles]
    latent_bits = tl.load(row[:, None, None] + column, mask=found[:, None, None] & used, other=0)
    if TILING.rope_offset < TILING.row_bytes:
        rope_bits = load_words((row + TILING.rope_offset)[:, None], rope_column, tl.uint16, found[:, None], ALIGN)
    if TILING.e8m0:
        scale_row = page_start + page_size * TILING.row_bytes + offset * TILING.padded_tiles
        exponents = tl.load(scale_row[:, None] + tile, mask=found[:, None], other=0)
        scales = e8m0_to_float(exponents)
    else:
        scale_bits = load_words((row + LATENT)[:, None], tile, tl.uint32, found[:, None], ALIGN)
        scales = scale_bits.to(tl.float32, bitcast=True)

    OUT_TYPE: tl.constexpr = out.dtype.element_ty
    out_row = out + rows * out_stride * OUT_ALIGN
    values = e4m3_to_float(latent_bits, NATIVE) * scales[:, :, None]
    tl.store(
        out_row[:, None, None] + column, from_float32(values, OUT_TYPE, INTERPRETED), mask=inside[:, None, None] & used
    )
    if TILING.rope_offset < TILING.row_bytes:
        ropes = rope_bits.to(tl.bfloat16, bitcast=True)
        if ropes.dtype != OUT_TYPE:
            ropes = from_float32(to_float32(ropes, INTERPRETED), OUT_TYPE, INTERPRETED)
        tl.store(out_row[:, None] + (LATENT + rope_column), ropes, mask=inside[:, None])


@kernel(by_element=("block_table", "cu_seqlens", "seq_starts", "seq_ends"))
def gather_rows_kernel(
    out,
    cache,
    scale_tensor,
    scale_value: tl.float32,
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
    row_stride: tl.int64,
    out_stride: tl.int64,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Formats without tiles: unquantised, or e4m3 bytes (uint8) with one scale. Strides are divided by their
    alignment."""
    column_blocks: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    first_row = (program // column_blocks).to(tl.int64) * BLOCK_T
    rows = first_row + tl.arange(0, BLOCK_T)
    column = (program % column_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    requests = Requests(
        cu_seqlens, cu_stride, num_boundaries, num_requests, seq_starts, start_stride, seq_ends, end_stride
    )
    pages = RequestPages(block_table, table_stride, max_pages, num_pages, page_size)
    if first_row >= end_of_rows(requests, num_rows):
        return
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    row = cache + (page * page_stride + offset * row_stride) * ALIGN
    # [BLOCK_T, BLOCK_C]
    found_columns = found[:, None] & (column < WIDTH)
    values = tl.load(row[:, None] + column, mask=found_columns, other=0)

    OUT_TYPE: tl.constexpr = out.dtype.element_ty
    if cache.dtype.element_ty == tl.uint8:
        scale = scale_value if scale_tensor is None else tl.load(scale_tensor)
        values = e4m3_to_float(values, NATIVE) * scale
        values = from_float32(tl.where(found_columns, values, 0.0), OUT_TYPE, INTERPRETED)
    elif values.dtype != OUT_TYPE:
        values = from_float32(to_float32(values, INTERPRETED), OUT_TYPE, INTERPRETED)
    out_row = out + rows * out_stride * OUT_ALIGN
    tl.store(out_row[:, None] + column, values, mask=inside[:, None] & (column < WIDTH))
