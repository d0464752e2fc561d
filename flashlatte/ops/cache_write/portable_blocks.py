"""``cache_write`` to formats with contiguous tokens of e4m3 or e2m1 values and a scale byte per block."""

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots
from flashlatte.kernels.triton.fp4 import e2m1_code, nvfp4_scales
from flashlatte.kernels.triton.fp8 import e4m3_to_float, float_to_e4m3, to_float32
from flashlatte.kernels.triton.tile_scales import quantize_tiles
from flashlatte.runtime.triton_kernel import kernel


@triton.jit
def _load_columns(x_row, rope_row, column, valid, X_WIDTH: tl.constexpr):
    """Load columns of rows that are given in one or two parts; 0 where not valid."""
    elements = tl.load(x_row[:, None] + column, mask=valid[:, None] & (column < X_WIDTH), other=0.0)
    if rope_row is not None:
        in_rope = column >= X_WIDTH
        ropes = tl.load(rope_row[:, None] + (column - X_WIDTH), mask=valid[:, None] & in_rope, other=0.0)
        elements = tl.where(in_rope, ropes, elements)
    return elements


@kernel(by_element=("slot_mapping",))
def write_blocks_kernel(
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
    SCALING: tl.constexpr,
    TAIL: tl.constexpr,
    X_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    X_ALIGN: tl.constexpr,
    ROPE_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Numbers from column X_WIDTH on come from ``rope``, the TAIL of them gets no scale. Strides come divided by their
    alignment; that of pages counts bytes."""
    SCALED: tl.constexpr = SCALING.block * SCALING.blocks
    VALUE_BYTES: tl.constexpr = SCALED // 2 if SCALING.fp4 else SCALED
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = Slots(slot_mapping, slot_stride, num_tokens, num_slots, page_size)
    valid, page, offset = locate_slots(slots, tokens, WIDE)
    row = cache + page * page_stride * ALIGN + offset * SCALING.token_bytes
    x_row = x + tokens * x_stride * X_ALIGN
    rope_row = None
    if rope is not None:
        rope_row = rope + tokens * rope_stride * ROPE_ALIGN

    column = tl.arange(0, SCALED)[None, :]
    elements = to_float32(_load_columns(x_row, rope_row, column, valid, X_WIDTH), INTERPRETED)  # [BLOCK_T, SCALED]
    block = tl.arange(0, SCALING.blocks)[None, :]
    if SCALING.fp4:
        # [BLOCK_T, blocks, block / 2]
        low, high = tl.split(tl.reshape(elements, [BLOCK_T, SCALING.blocks, SCALING.block // 2, 2]))
        scales = nvfp4_scales(low, high, SCALING.rounds_up, NATIVE)
        divisors = tl.broadcast_to(e4m3_to_float(scales, NATIVE)[:, :, None], low.shape)
        codes = e2m1_code(tl.div_rn(low, divisors)) | (e2m1_code(tl.div_rn(high, divisors)) << 4)
        values = tl.reshape(codes, [BLOCK_T, VALUE_BYTES]).to(tl.uint8)
    else:
        scaled, scale_bits = quantize_tiles(tl.reshape(elements, [BLOCK_T, SCALING.blocks, SCALING.block]), True)
        scales = (scale_bits >> 23).to(tl.uint8)
        values = float_to_e4m3(tl.reshape(scaled, [BLOCK_T, SCALED]), NATIVE)
    tl.store(row[:, None] + tl.arange(0, VALUE_BYTES)[None, :], values, mask=valid[:, None])
    scale_index = SCALING.blocks // SCALING.scale_lanes * (block % SCALING.scale_lanes) + block // SCALING.scale_lanes
    tl.store(row[:, None] + SCALING.scale_offset + scale_index, scales, mask=valid[:, None])
    if TAIL > 0:
        column = SCALED + tl.arange(0, TAIL)[None, :]
        tail = to_float32(_load_columns(x_row, rope_row, column, valid, X_WIDTH), INTERPRETED)  # [BLOCK_T, TAIL]
        tail_bytes = row[:, None] + VALUE_BYTES + tl.arange(0, TAIL)[None, :]
        tl.store(tail_bytes, float_to_e4m3(tail, NATIVE), mask=valid[:, None])
