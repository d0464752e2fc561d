"""``cache_gather`` in Triton: copies the tokens of several requests to a contiguous latent and dequantizes them."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import triton.language as tl

from flashlatte.kernels.triton.cache_address import (
    RequestPages,
    Requests,
    block_scale_byte,
    end_of_rows,
    load_words,
    locate_rows,
    pages_of,
    requests_of,
    tile_scale_row,
)
from flashlatte.kernels.triton.cache_layout import Blocking, as_bytes, cdiv
from flashlatte.kernels.triton.cache_row import CacheScale, load_scale
from flashlatte.kernels.triton.fp4 import e2m1_to_float
from flashlatte.kernels.triton.fp8 import cast, converts_e4m3, e4m3_to_float, e8m0_to_float, from_float32
from flashlatte.kernels.triton.rows import (
    CacheRows,
    TokenRows,
    cache_rows,
    page_pointers,
    slot_row,
    token_row,
    token_rows,
)
from flashlatte.ops.cache_gather.reference import CacheGatherParams
from flashlatte.runtime.triton_kernel import kernel

SCALED_BLOCKING = Blocking(tokens=4, warps=1)
ROWS_BLOCKING = Blocking(tokens=32, warps=4)
ROWS_COLUMNS = 64


def cache_gather(params: CacheGatherParams) -> None:
    cache, out, layout = as_bytes(params.cache), params.out, params.layout
    block_table, rows = params.block_table, params.out.shape[0]
    num_pages, page_size, _, width = cache.shape
    tiling, scaling = layout.tiling, layout.block_scaling
    is_plain = tiling is None and scaling is None
    records = (
        cache_rows(cache, strided=is_plain),
        requests_of(params.cu_seqlens, block_table.shape[0], params.seq_starts, params.seq_ends),
        pages_of(block_table, num_pages, page_size),
        token_rows(out),
    )
    wide, native = block_table.shape[1] * page_size >= 2**31, converts_e4m3(cache.device)
    blocking = ROWS_BLOCKING if is_plain else SCALED_BLOCKING
    block, warps = blocking.tokens, blocking.warps
    blocks = cdiv(rows, block)
    if tiling is not None:
        gather_tiles_kernel[(blocks,)](
            *records, num_rows=rows, TILING=tiling, WIDE=wide, NATIVE=native, BLOCK_T=block, num_warps=warps
        )
    elif scaling is not None:
        tail = layout.head_dim - scaling.block * scaling.blocks
        gather_blocks_kernel[(blocks,)](
            *records,
            num_rows=rows,
            SCALING=scaling,
            TAIL=tail,
            WIDE=wide,
            NATIVE=native,
            BLOCK_T=block,
            num_warps=warps,
        )
    else:
        gather_rows_kernel[(blocks * cdiv(width, ROWS_COLUMNS),)](
            *records,
            CacheScale(params.scale_tensor, params.scale_value),
            num_rows=rows,
            WIDTH=width,
            WIDE=wide,
            NATIVE=native,
            BLOCK_T=block,
            BLOCK_C=ROWS_COLUMNS,
            num_warps=warps,
        )


@kernel
def gather_tiles_kernel(
    cache: CacheRows,
    requests: Requests,
    pages: RequestPages,
    out: TokenRows,
    num_rows: tl.int64,
    TILING: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Formats with a scale per tile."""
    LATENT: tl.constexpr = TILING.tiles * TILING.tile
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = first_row + tl.arange(0, BLOCK_T)
    if first_row >= end_of_rows(requests, num_rows):
        return
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    page_start = page_pointers(cache, page)
    row = page_start + offset * TILING.row_bytes

    tile = tl.arange(0, TILING.padded_tiles)[None, :]
    column = tile[:, :, None] * TILING.tile + tl.arange(0, TILING.tile)[None, None, :]
    rope_column = tl.arange(0, 64)[None, :]
    used = tile[:, :, None] < TILING.tiles
    # [BLOCK_T, padded_tiles, tile], [BLOCK_T, 64], [BLOCK_T, padded_tiles]
    latent_bits = tl.load(row[:, None, None] + column, mask=found[:, None, None] & used, other=0)
    if TILING.rope_offset < TILING.row_bytes:
        rope_bits = load_words((row + TILING.rope_offset)[:, None], rope_column, tl.uint16, found[:, None], cache.align)
    if TILING.e8m0:
        scale_row = tile_scale_row(page_start, pages.page_size, offset, TILING)
        exponents = tl.load(scale_row[:, None] + tile, mask=found[:, None], other=0)
        scales = e8m0_to_float(exponents)
    else:
        scale_bits = load_words((row + LATENT)[:, None], tile, tl.uint32, found[:, None], cache.align)
        scales = scale_bits.to(tl.float32, bitcast=True)

    OUT_TYPE: tl.constexpr = out.start.dtype.element_ty
    out_row = token_row(out, rows)
    values = e4m3_to_float(latent_bits, NATIVE) * scales[:, :, None]
    tl.store(out_row[:, None, None] + column, from_float32(values, OUT_TYPE), mask=inside[:, None, None] & used)
    if TILING.rope_offset < TILING.row_bytes:
        ropes = cast(rope_bits.to(tl.bfloat16, bitcast=True), OUT_TYPE)
        tl.store(out_row[:, None] + (LATENT + rope_column), ropes, mask=inside[:, None])


@kernel
def gather_blocks_kernel(
    cache: CacheRows,
    requests: Requests,
    pages: RequestPages,
    out: TokenRows,
    num_rows: tl.int64,
    SCALING: tl.constexpr,
    TAIL: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Formats with contiguous tokens of e4m3 or e2m1 values and a scale byte per block; the last TAIL values have no
    scale."""
    SCALED: tl.constexpr = SCALING.block * SCALING.blocks
    VALUE_BYTES: tl.constexpr = SCALED // 2 if SCALING.fp4 else SCALED
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = first_row + tl.arange(0, BLOCK_T)
    if first_row >= end_of_rows(requests, num_rows):
        return
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    row = (page_pointers(cache, page) + offset * SCALING.token_bytes)[:, None]
    found = found[:, None]

    block = tl.arange(0, SCALING.blocks)[None, :]
    scale_row = row + SCALING.scale_offset
    scale_bytes = tl.load(scale_row + block_scale_byte(block, SCALING), mask=found, other=0)  # [BLOCK_T, blocks]
    byte = tl.arange(0, VALUE_BYTES)[None, :]
    codes = tl.load(row + byte, mask=found, other=0)  # [BLOCK_T, VALUE_BYTES]
    if SCALING.fp4:
        pairs = codes.to(tl.int32)
        values = tl.reshape(tl.join(e2m1_to_float(pairs & 15), e2m1_to_float(pairs >> 4)), [BLOCK_T, SCALED])
        scales = e4m3_to_float(scale_bytes, NATIVE)
    else:
        values = e4m3_to_float(codes, NATIVE)
        scales = e8m0_to_float(scale_bytes)
    values = tl.reshape(values, [BLOCK_T, SCALING.blocks, SCALING.block]) * scales[:, :, None]

    OUT_TYPE: tl.constexpr = out.start.dtype.element_ty
    out_row = token_row(out, rows)[:, None]
    column = tl.arange(0, SCALED)[None, :]
    elements = from_float32(tl.reshape(values, [BLOCK_T, SCALED]), OUT_TYPE)
    tl.store(out_row + column, elements, mask=inside[:, None])
    if TAIL > 0:
        column = tl.arange(0, TAIL)[None, :]
        tail = tl.load(row + VALUE_BYTES + column, mask=found, other=0)  # [BLOCK_T, TAIL]
        elements = from_float32(e4m3_to_float(tail, NATIVE), OUT_TYPE)
        tl.store(out_row + SCALED + column, elements, mask=inside[:, None])


@kernel
def gather_rows_kernel(
    cache: CacheRows,
    requests: Requests,
    pages: RequestPages,
    out: TokenRows,
    scale: CacheScale,
    num_rows: tl.int64,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Formats without tiles: unquantized, or e4m3 bytes (uint8) with one scale."""
    column_blocks: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    first_row = (program // column_blocks).to(tl.int64) * BLOCK_T
    rows = first_row + tl.arange(0, BLOCK_T)
    column = (program % column_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    if first_row >= end_of_rows(requests, num_rows):
        return
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    # [BLOCK_T, BLOCK_C]
    found_columns = found[:, None] & (column < WIDTH)
    values = tl.load(slot_row(cache, page, offset)[:, None] + column, mask=found_columns, other=0)

    OUT_TYPE: tl.constexpr = out.start.dtype.element_ty
    if cache.start.dtype.element_ty == tl.uint8:
        values = e4m3_to_float(values, NATIVE) * load_scale(scale)
        values = from_float32(tl.where(found_columns, values, 0.0), OUT_TYPE)
    else:
        values = cast(values, OUT_TYPE)
    tl.store(token_row(out, rows)[:, None] + column, values, mask=inside[:, None] & (column < WIDTH))
