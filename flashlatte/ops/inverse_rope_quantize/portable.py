"""``inverse_rope_quantize`` in Triton: one program processes a tile of some heads of a token."""

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import alignment_elements, cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, to_float32
from flashlatte.kernels.triton.rotate import angles, rotate_tail_by
from flashlatte.kernels.triton.row_scales import scale_rows
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

TILE, SMALLEST_AMAX = 128, 1e-10
# Heads and warps of a program.
HEADS, WARPS = 16, 2


def inverse_rope_quantize(
    o: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> None:
    tokens, heads, head_dim = o.shape
    groups, _, padded = scales.shape
    packed = scales.dtype == torch.int32
    strides = stride_in_use(o, 0), stride_in_use(o, 1)
    unit = alignment_elements(o, *strides)
    head_blocks, tiles = cdiv(heads, HEADS), head_dim // TILE
    inverse_rope_quantize_kernel[(padded * head_blocks * tiles,)](
        o=o,
        cos_sin=cos_sin,
        positions=positions,
        values=values,
        scales=scales.view(torch.uint8) if packed else scales,
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
        PACKED=packed,
        ALIGN=unit,
        NATIVE=converts_e4m3(o.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_H=HEADS,
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
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Tokens from ``num_tokens`` on are padding of the scales, which is 0."""
    TILES: tl.constexpr = D // TILE
    # Tiles of the same heads are adjacent in the grid.
    tile, block = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    token = (block // head_blocks).to(tl.int64)
    head = (block % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < heads
    real = there & (token < num_tokens)
    column = tile * TILE + tl.arange(0, TILE)[None, :]
    o_row = o + (token * o_stride + head.to(tl.int64) * o_head_stride) * ALIGN
    x = to_float32(tl.load(o_row[:, None] + column, mask=real[:, None], other=0.0), INTERPRETED)  # [BLOCK_H, TILE]
    first = D - ROPE - tile * TILE
    if first < TILE:
        position = tl.load(positions + token * position_stride, mask=token < num_tokens, other=0).to(tl.int64)
        # 1-D loads get their layout from x; with 2-D loads, x would get its layout from them.
        cosine, sine = angles(cos_sin, position, num_positions, tl.arange(0, TILE // 2) - first // 2, ROPE)
        x = rotate_tail_by(x, cosine[None, :], -sine[None, :], first, BLOCK_H, TILE)
    scaled, factors = scale_rows(x, smallest_amax, True)
    # The heads of a group are contiguous; the groups follow each other.
    group = head // group_heads
    row = (group * num_tokens + token) * group_heads + head % group_heads
    out_row = values + row * D
    tl.store(out_row[:, None] + column, float_to_e4m3(scaled, NATIVE), mask=real[:, None])

    factors = tl.where(real, factors, 0.0)
    if PACKED:
        # One byte of the word that packs four tiles' scales.
        at = ((head * (TILES // 4) + tile // 4) * padded + token) * 4 + tile % 4
        tl.store(scales + at, (factors.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=there)
    else:
        tl.store(scales + (head * TILES + tile) * padded + token, factors, mask=there)
