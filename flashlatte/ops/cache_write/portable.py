"""``cache_write`` in Triton: quantizes new tokens and writes them to their slots."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import (
    PageLists,
    Slots,
    block_scale_byte,
    locate_positions,
    locate_slots,
    slots_of,
    store_words,
    tile_scale_row,
)
from flashlatte.kernels.triton.cache_layout import Blocking, as_bytes, cdiv
from flashlatte.kernels.triton.cache_row import CacheScale, encode_blocks, encode_elements, load_scale
from flashlatte.kernels.triton.fp8 import cast, converts_e4m3, float_to_e4m3, to_float32
from flashlatte.kernels.triton.row_scales import quantize_tiles
from flashlatte.kernels.triton.rows import (
    CacheRows,
    TokenRows,
    cache_rows,
    page_pointers,
    slot_row,
    token_row,
    token_rows,
)
from flashlatte.ops.cache_write.reference import CacheWriteParams
from flashlatte.runtime.strides import first_stride
from flashlatte.runtime.triton_kernel import kernel

TILED_BLOCKING = Blocking(tokens=8, warps=2)
SCALED_BLOCKING = Blocking(tokens=8, warps=4)
ROWS_BLOCKING = Blocking(tokens=32, warps=4)
ROWS_COLUMNS = 64


def cache_write(params: CacheWriteParams) -> None:
    cache, x, rope, layout = as_bytes(params.cache), params.x, params.rope, params.layout
    tiling, scaling = layout.tiling, layout.block_scaling
    rope_column = 0
    if tiling is not None and rope is None:
        rope, rope_column = x, tiling.tiles * tiling.tile
    slots = slots_of(params.slot_mapping, cache)
    rows = cache_rows(cache, strided=tiling is None and scaling is None)
    records = (rows, slots, token_rows(x), token_rows(rope))
    wide, native = slots.num_slots >= 2**31, converts_e4m3(cache.device)
    if tiling is not None:
        write_tiles_kernel[(cdiv(slots.num_tokens, TILED_BLOCKING.tokens),)](
            *records,
            WIDE=wide,
            NATIVE=native,
            TILING=tiling,
            POWER_OF_TWO=params.scale_rounding == "power_of_two" or tiling.e8m0,
            ROPE_COLUMN=rope_column,
            BLOCK_T=TILED_BLOCKING.tokens,
            num_warps=TILED_BLOCKING.warps,
        )
    elif scaling is not None:
        write_blocks_kernel[(cdiv(slots.num_tokens, SCALED_BLOCKING.tokens),)](
            *records,
            WIDE=wide,
            NATIVE=native,
            SCALING=scaling,
            TAIL=layout.head_dim - scaling.block * scaling.blocks,
            X_WIDTH=x.shape[1],
            BLOCK_T=SCALED_BLOCKING.tokens,
            num_warps=SCALED_BLOCKING.warps,
        )
    else:
        width, of_requests = cache.shape[-1], params.request_ids is not None
        write = write_request_rows_kernel if of_requests else write_rows_kernel
        write[(cdiv(slots.num_tokens, ROWS_BLOCKING.tokens) * cdiv(width, ROWS_COLUMNS),)](
            *records,
            CacheScale(params.scale_tensor, params.scale_value),
            *([_page_lists(params)] if of_requests else []),
            WIDE=params.slot_mapping.dtype == torch.int64 if of_requests else wide,
            NATIVE=native,
            WIDTH=width,
            X_WIDTH=x.shape[1],
            BLOCK_T=ROWS_BLOCKING.tokens,
            BLOCK_C=ROWS_COLUMNS,
            num_warps=ROWS_BLOCKING.warps,
        )


def _page_lists(params: CacheWriteParams) -> PageLists:
    request_ids, indices, indptr = params.request_ids, params.page_indices, params.page_indptr
    assert request_ids is not None
    assert indices is not None
    assert indptr is not None
    lists = (request_ids, first_stride(request_ids), indptr, first_stride(indptr), indptr.shape[0] - 1)
    return PageLists(*lists, indices, first_stride(indices), indices.shape[0], params.cache.shape[0])


@kernel
def write_tiles_kernel(
    cache: CacheRows,
    slots: Slots,
    x: TokenRows,
    rope: TokenRows,
    TILING: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROPE_COLUMN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Formats with a scale per tile."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid, page, offset = locate_slots(slots, tokens, WIDE)
    page_start = page_pointers(cache, page)
    row = page_start + offset * TILING.row_bytes

    tile = tl.arange(0, TILING.padded_tiles)[None, :]
    column = tile[:, :, None] * TILING.tile + tl.arange(0, TILING.tile)[None, None, :]
    latent_mask = valid[:, None, None] & (tile[:, :, None] < TILING.tiles)
    # [BLOCK_T, padded_tiles, tile] and [BLOCK_T, 64]
    latents = tl.load(token_row(x, tokens)[:, None, None] + column, mask=latent_mask, other=0.0)
    if TILING.rope_offset < TILING.row_bytes:
        rope_index = tl.arange(0, 64)[None, :]
        rope_row = token_row(rope, tokens)
        ropes = tl.load(rope_row[:, None] + (ROPE_COLUMN + rope_index), mask=valid[:, None], other=0.0)

    values, scales = quantize_tiles(to_float32(latents), POWER_OF_TWO)
    tl.store(row[:, None, None] + column, float_to_e4m3(values, NATIVE), mask=latent_mask)
    if TILING.rope_offset < TILING.row_bytes:
        rope_bits = cast(ropes, tl.bfloat16).to(tl.uint16, bitcast=True)
        store_words((row + TILING.rope_offset)[:, None], rope_index, rope_bits, valid[:, None], cache.align)
    if TILING.e8m0:
        exponents = tl.where(tile < TILING.tiles, scales >> 23, 0).to(tl.uint8)
        scale_row = tile_scale_row(page_start, slots.page_size, offset, TILING)
        tl.store(scale_row[:, None] + tile, exponents, mask=valid[:, None])
    else:
        store_words((row + TILING.tiles * TILING.tile)[:, None], tile, scales, valid[:, None], cache.align)


@kernel
def write_blocks_kernel(
    cache: CacheRows,
    slots: Slots,
    x: TokenRows,
    rope: TokenRows,
    SCALING: tl.constexpr,
    TAIL: tl.constexpr,
    X_WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Formats with contiguous tokens of e4m3 or e2m1 values and a scale byte per block; the last TAIL values have no
    scale."""
    SCALED: tl.constexpr = SCALING.block * SCALING.blocks
    VALUE_BYTES: tl.constexpr = SCALED // 2 if SCALING.fp4 else SCALED
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid, page, offset = locate_slots(slots, tokens, WIDE)
    row = page_pointers(cache, page) + offset * SCALING.token_bytes

    column = tl.arange(0, SCALED)[None, :]
    elements = to_float32(_load_columns(x, rope, tokens, column, valid[:, None], X_WIDTH))
    block = tl.arange(0, SCALING.blocks)[None, :]
    values, scales = encode_blocks(elements, BLOCK_T, SCALING, NATIVE)
    tl.store(row[:, None] + tl.arange(0, VALUE_BYTES)[None, :], values, mask=valid[:, None])
    scale_row = row[:, None] + SCALING.scale_offset
    tl.store(scale_row + block_scale_byte(block, SCALING), scales, mask=valid[:, None])
    if TAIL > 0:
        column = SCALED + tl.arange(0, TAIL)[None, :]
        tail = to_float32(_load_columns(x, rope, tokens, column, valid[:, None], X_WIDTH))
        tail_bytes = row[:, None] + VALUE_BYTES + tl.arange(0, TAIL)[None, :]
        tl.store(tail_bytes, float_to_e4m3(tail, NATIVE), mask=valid[:, None])


@kernel
def write_rows_kernel(
    cache: CacheRows,
    slots: Slots,
    x: TokenRows,
    rope: TokenRows,
    scale: CacheScale,
    WIDTH: tl.constexpr,
    X_WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Formats without tiles: unquantized, or e4m3 bytes (uint8) with one scale."""
    tokens, column = _tile_of_rows(WIDTH, BLOCK_T, BLOCK_C)
    valid, page, offset = locate_slots(slots, tokens, WIDE)
    _write_columns(cache, x, rope, scale, tokens, column, valid, page, offset, WIDTH, X_WIDTH, NATIVE)


@kernel
def write_request_rows_kernel(
    cache: CacheRows,
    positions: Slots,
    x: TokenRows,
    rope: TokenRows,
    scale: CacheScale,
    lists: PageLists,
    WIDTH: tl.constexpr,
    X_WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """``write_rows_kernel`` for tokens with positions in requests."""
    tokens, column = _tile_of_rows(WIDTH, BLOCK_T, BLOCK_C)
    valid, page, offset = locate_positions(positions, lists, tokens, WIDE)
    _write_columns(cache, x, rope, scale, tokens, column, valid, page, offset, WIDTH, X_WIDTH, NATIVE)


@triton.jit
def _tile_of_rows(WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program's tokens [BLOCK_T] and columns [1, BLOCK_C]."""
    column_blocks: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    tokens = (program // column_blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    return tokens, (program % column_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]


@triton.jit
def _write_columns(
    cache,
    x,
    rope,
    scale,
    tokens,
    column,
    valid,
    page,
    offset,
    WIDTH: tl.constexpr,
    X_WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = slot_row(cache, page, offset)[:, None]
    mask = valid[:, None] & (column < WIDTH)
    elements = _load_columns(x, rope, tokens, column, mask, X_WIDTH)  # [BLOCK_T, BLOCK_C]
    elements = encode_elements(elements, cache.start.dtype.element_ty, load_scale(scale), NATIVE)
    tl.store(row + column, elements, mask=mask)


@triton.jit
def _load_columns(x, rope, tokens, column, mask, X_WIDTH: tl.constexpr):
    """Columns of rows, those from X_WIDTH on from ``rope`` if it is given; 0 where masked."""
    elements = tl.load(token_row(x, tokens)[:, None] + column, mask=mask & (column < X_WIDTH), other=0.0)
    if rope.start is not None:
        in_rope = column >= X_WIDTH
        ropes = tl.load(token_row(rope, tokens)[:, None] + (column - X_WIDTH), mask=mask & in_rope, other=0.0)
        elements = tl.where(in_rope, ropes, elements)
    return elements
