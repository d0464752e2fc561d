"""``cache_write`` in Triton: quantises new tokens and writes them to their slots."""

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots, store_words
from flashlatte.kernels.triton.cache_layout import Blocking, alignment_elements, as_bytes, cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, from_float32, to_float32
from flashlatte.kernels.triton.tile_scales import quantize_tiles
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.ops.cache_write.portable_blocks import write_blocks_kernel
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

TILED_BLOCKING = Blocking(tokens=8, warps=2)
SCALED_BLOCKING = Blocking(tokens=8, warps=4)
ROWS_BLOCKING = Blocking(tokens=32, warps=4)
ROWS_COLUMNS = 64


def cache_write(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    x: torch.Tensor,
    rope: torch.Tensor | None,
    layout: CacheFormat,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
    scale_rounding: str,
) -> None:
    cache = as_bytes(cache)
    tiling, scaling = layout.tiling, layout.block_scaling
    rope_column = 0
    if tiling is not None and rope is None:
        rope, rope_column = x, tiling.tiles * tiling.tile
    page_stride, x_stride = stride_in_use(cache, 0), stride_in_use(x, 0)
    row_stride = stride_in_use(cache, 1) if tiling is None and scaling is None else 0
    rope_stride = 0 if rope is None else stride_in_use(rope, 0)
    align = alignment_elements(cache, page_stride, row_stride)
    x_align = alignment_elements(x, x_stride)
    rope_align = 1 if rope is None else alignment_elements(rope, rope_stride)
    num_tokens = slot_mapping.shape[0]
    num_slots = cache.shape[0] * cache.shape[1]
    tokens = {
        "cache": cache,
        "slot_mapping": slot_mapping,
        "x": x,
        "rope": rope,
        "num_tokens": num_tokens,
        "num_slots": num_slots,
        "page_size": cache.shape[1],
        "slot_stride": slot_mapping.stride(0),
        "page_stride": page_stride // align,
        "x_stride": x_stride // x_align,
        "rope_stride": rope_stride // rope_align,
    }
    variant = {
        "ALIGN": align,
        "X_ALIGN": x_align,
        "ROPE_ALIGN": rope_align,
        "WIDE": num_slots >= 2**31,
        "NATIVE": converts_e4m3(cache.device),
        "INTERPRETED": machine.interpreting(),
    }
    if tiling is not None:
        write_tiles_kernel[(cdiv(num_tokens, TILED_BLOCKING.tokens),)](
            **tokens,
            **variant,
            TILING=tiling,
            POWER_OF_TWO=scale_rounding == "power_of_two" or tiling.e8m0,
            ROPE_COLUMN=rope_column,
            BLOCK_T=TILED_BLOCKING.tokens,
            num_warps=TILED_BLOCKING.warps,
        )
    elif scaling is not None:
        write_blocks_kernel[(cdiv(num_tokens, SCALED_BLOCKING.tokens),)](
            **tokens,
            **variant,
            SCALING=scaling,
            TAIL=layout.head_dim - scaling.block * scaling.blocks,
            X_WIDTH=x.shape[1],
            BLOCK_T=SCALED_BLOCKING.tokens,
            num_warps=SCALED_BLOCKING.warps,
        )
    else:
        width = cache.shape[-1]
        write_rows_kernel[(cdiv(num_tokens, ROWS_BLOCKING.tokens) * cdiv(width, ROWS_COLUMNS),)](
            **tokens,
            **variant,
            row_stride=row_stride // align,
            scale_tensor=scale_tensor,
            scale_value=scale_value,
            WIDTH=width,
            X_WIDTH=x.shape[1],
            BLOCK_T=ROWS_BLOCKING.tokens,
            BLOCK_C=ROWS_COLUMNS,
            num_warps=ROWS_BLOCKING.warps,
        )


@kernel(by_element=("slot_mapping",))
def write_tiles_kernel(
    cache,
    slot_mapping,
    x,
    rope,
    num_tokens: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    slot_stride: tl.int64,
    page_stride: tl.int64,
    x_stride: tl.int64,
    rope_stride: tl.int64,
    TILING: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGN: tl.constexpr,
    ROPE_COLUMN: tl.constexpr,
    X_ALIGN: tl.constexpr,
    ROPE_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Formats with a scale per tile. Strides come divided by their alignment; that of pages counts bytes."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = Slots(slot_mapping, slot_stride, num_tokens, num_slots, page_size)
    valid, page, offset = locate_slots(slots, tokens, WIDE)
    page_start = cache + page * page_stride * ALIGN
    row = page_start + offset * TILING.row_bytes

    tile = tl.arange(0, TILING.padded_tiles)[None, :]
    column = tile[:, :, None] * TILING.tile + tl.arange(0, TILING.tile)[None, None, :]
    latent_mask = valid[:, None, None] & (tile[:, :, None] < TILING.tiles)
    x_row = x + tokens * x_stride * X_ALIGN
    # [BLOCK_T, padded_tiles, tile] and [BLOCK_T, 64]
    latents = tl.load(x_row[:, None, None] + column, mask=latent_mask, other=0.0)
    if TILING.rope_offset < TILING.row_bytes:
        rope_index = tl.arange(0, 64)[None, :]
        rope_row = rope + tokens * rope_stride * ROPE_ALIGN
        ropes = tl.load(rope_row[:, None] + (ROPE_COLUMN + rope_index), mask=valid[:, None], other=0.0)

    values, scales = quantize_tiles(to_float32(latents, INTERPRETED), POWER_OF_TWO)
    tl.store(row[:, None, None] + column, float_to_e4m3(values, NATIVE), mask=latent_mask)
    if TILING.rope_offset < TILING.row_bytes:
        if ropes.dtype != tl.bfloat16:
            ropes = from_float32(to_float32(ropes, INTERPRETED), tl.bfloat16, INTERPRETED)
        rope_bits = ropes.to(tl.uint16, bitcast=True)
        store_words((row + TILING.rope_offset)[:, None], rope_index, rope_bits, valid[:, None], ALIGN)
    if TILING.e8m0:
        exponents = tl.where(tile < TILING.tiles, scales >> 23, 0).to(tl.uint8)
        scale_row = page_start + page_size * TILING.row_bytes + offset * TILING.padded_tiles
        tl.store(scale_row[:, None] + tile, exponents, mask=valid[:, None])
    else:
        store_words((row + TILING.tiles * TILING.tile)[:, None], tile, scales, valid[:, None], ALIGN)


@kernel(by_element=("slot_mapping",))
def write_rows_kernel(
    cache,
    slot_mapping,
    x,
    rope,
    scale_tensor,
    scale_value: tl.float32,
    num_tokens: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    slot_stride: tl.int64,
    page_stride: tl.int64,
    row_stride: tl.int64,
    x_stride: tl.int64,
    rope_stride: tl.int64,
    WIDTH: tl.constexpr,
    X_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    X_ALIGN: tl.constexpr,
    ROPE_ALIGN: tl.constexpr,
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
    tokens = (program // column_blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = (program % column_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    slots = Slots(slot_mapping, slot_stride, num_tokens, num_slots, page_size)
    valid, page, offset = locate_slots(slots, tokens, WIDE)
    row = cache + (page * page_stride + offset * row_stride) * ALIGN
    mask = valid[:, None] & (column < WIDTH)

    # [BLOCK_T, BLOCK_C]
    x_row = x + tokens * x_stride * X_ALIGN
    values = tl.load(x_row[:, None] + column, mask=mask & (column < X_WIDTH), other=0.0)
    if rope is not None:
        rope_row = rope + tokens * rope_stride * ROPE_ALIGN
        ropes = tl.load(rope_row[:, None] + (column - X_WIDTH), mask=mask & (column >= X_WIDTH), other=0.0)
        values = tl.where(column < X_WIDTH, values, ropes)

    if cache.dtype.element_ty == tl.uint8:
        scale = scale_value if scale_tensor is None else tl.load(scale_tensor)
        values = float_to_e4m3(tl.div_rn(to_float32(values, INTERPRETED), scale), NATIVE)
    elif cache.dtype.element_ty != values.dtype:
        values = from_float32(to_float32(values, INTERPRETED), cache.dtype.element_ty, INTERPRETED)
    tl.store(row[:, None] + column, values, mask=mask)
