"""``inverse_rope_quantize`` in Triton: one program takes some heads of a token."""

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import blocks, unit_bytes
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, widen
from flashlatte.kernels.triton.rotate import rotate_tail
from flashlatte.kernels.triton.row_scales import scale_rows
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

TILE, SMALLEST_AMAX = 128, 1e-10
# Numbers that a program takes, and its warps.
NUMBERS, WARPS = 2048, 2


def inverse_rope_quantize(
    o: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> None:
    tokens, heads, head_dim = o.shape
    groups, _, padded = scales.shape
    strides = stride_in_use(o, 0), stride_in_use(o, 1)
    unit = unit_bytes(o, *strides) // o.element_size()
    block = max(min(NUMBERS // head_dim, 32), 1)
    head_blocks = blocks(heads, block)
    inverse_rope_quantize_kernel[(padded * head_blocks,)](
        o=o,
        cos_sin=cos_sin,
        positions=positions,
        values=values,
        scales=scales,
        smallest_amax=SMALLEST_AMAX,
        num_tokens=tokens,
        padded=padded,
        heads=heads,
        group_heads=heads // groups,
        head_blocks=head_blocks,
        num_positions=cos_sin.shape[0],
        position_stride=positions.stride(0),
        o_stride=strides[0] // unit,
        o_head_stride=strides[1] // unit,
        D=head_dim,
        ROPE=cos_sin.shape[1],
        TILE=TILE,
        PACKED=scales.dtype == torch.int32,
        UNIT=unit,
        NATIVE=converts_e4m3(o.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_H=block,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


@kernel(by_element=("positions",))
def inverse_rope_quantize_kernel(
    o,
    cos_sin,
    positions,
    values,
    scales,
    smallest_amax: tl.float32,
    num_tokens: tl.int64,
    padded: tl.int64,
    heads: tl.int32,
    group_heads: tl.int32,
    head_blocks: tl.int32,
    num_positions: tl.int64,
    position_stride: tl.int64,
    o_stride: tl.int64,
    o_head_stride: tl.int64,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Tokens from ``num_tokens`` on exist in the scales only, where they are 0."""
    TILES: tl.constexpr = D // TILE
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < heads
    real = there & (token < num_tokens)
    column = tl.arange(0, D)[None, :]
    o_row = o + (token * o_stride + head.to(tl.int64) * o_head_stride) * UNIT
    x = widen(tl.load(o_row[:, None] + column, mask=real[:, None], other=0.0), INTERPRETED)  # [BLOCK_H, D]
    position = tl.load(positions + token * position_stride, mask=token < num_tokens, other=0).to(tl.int64)
    x = rotate_tail(x, cos_sin, position, num_positions, BLOCK_H, D, ROPE, INVERSE=True)

    rows = tl.reshape(x, [BLOCK_H * TILES, TILE])
    scaled, factors = scale_rows(rows, smallest_amax, True)
    codes = float_to_e4m3(scaled, NATIVE)
    # The heads of a group stand side by side, the groups one after the other.
    group = head // group_heads
    place = (group * num_tokens + token) * group_heads + head % group_heads
    out_row = values + place * D
    tl.store(out_row[:, None] + column, tl.reshape(codes, [BLOCK_H, D]), mask=real[:, None])

    factors = tl.reshape(factors, [BLOCK_H, TILES])
    factors = tl.where(real[:, None], factors, 0.0)
    if PACKED:
        tile = tl.arange(0, TILES)[None, :]
        exponents = (factors.to(tl.int32, bitcast=True) >> 23) << (8 * (tile % 4))
        words = tl.sum(tl.reshape(exponents, [BLOCK_H, TILES // 4, 4]), axis=2)
        word = tl.arange(0, TILES // 4)[None, :]
        at = (head[:, None] * (TILES // 4) + word) * padded + token
        tl.store(scales + at, words, mask=there[:, None])
    else:
        tile = tl.arange(0, TILES)[None, :]
        tl.store(scales + (head[:, None] * TILES + tile) * padded + token, factors, mask=there[:, None])
