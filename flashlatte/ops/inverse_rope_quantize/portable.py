"""``inverse_rope_quantize`` in Triton: one program processes a tile of some heads of a token."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, to_float32
from flashlatte.kernels.triton.rotate import TokenRotation, angles, rotate_tail_by, rotation_of
from flashlatte.kernels.triton.row_scales import scale_rows
from flashlatte.kernels.triton.rows import HeadRows, head_row, head_rows
from flashlatte.runtime.triton_kernel import kernel

TILE, SMALLEST_AMAX = 128, 1e-10
# Heads and warps of a program.
HEADS, WARPS = 16, 2
_TILE, _BLOCK_H = tl.constexpr(TILE), tl.constexpr(HEADS)


def inverse_rope_quantize(
    o: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> None:
    tokens, heads, head_dim = o.shape
    groups, _, padded = scales.shape
    packed = scales.dtype == torch.int32
    head_blocks, tiles = cdiv(heads, HEADS), head_dim // TILE
    inverse_rope_quantize_kernel[(padded * head_blocks * tiles,)](
        head_rows(o),
        rotation_of(cos_sin, positions),
        values=values,
        scales=scales.view(torch.uint8) if packed else scales,
        smallest_amax=SMALLEST_AMAX,
        num_tokens=tokens,
        padded=padded,
        heads=heads,
        group_heads=heads // groups,
        head_blocks=head_blocks,
        D=head_dim,
        ROPE=cos_sin.shape[1],
        NATIVE=converts_e4m3(o.device),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


@kernel
def inverse_rope_quantize_kernel(
    o: HeadRows,
    rotation: TokenRotation,
    values,
    scales,
    smallest_amax: tl.float32,
    num_tokens: tl.int64,
    padded: tl.int64,
    heads: tl.int32,
    group_heads: tl.int32,
    head_blocks: tl.int32,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Tokens from ``num_tokens`` on are padding of the scales, which is 0."""
    TILES: tl.constexpr = D // _TILE
    # Tiles of the same heads are adjacent in the grid.
    tile, block = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    token = (block // head_blocks).to(tl.int64)
    head = (block % head_blocks) * _BLOCK_H + tl.arange(0, _BLOCK_H)
    in_heads = head < heads
    real = in_heads & (token < num_tokens)
    column = tile * _TILE + tl.arange(0, _TILE)[None, :]
    o_row = head_row(o, token, head)
    x = to_float32(tl.load(o_row[:, None] + column, mask=real[:, None], other=0.0))
    first = D - ROPE - tile * _TILE
    if first < _TILE:
        position = tl.load(rotation.positions + token * rotation.position_stride, mask=token < num_tokens, other=0).to(
            tl.int64
        )
        # 1-D loads get their layout from x; with 2-D loads, x would get its layout from them.
        pair = tl.arange(0, _TILE // 2) - first // 2
        cosine, sine = angles(rotation.cos_sin, position, rotation.num_positions, pair, ROPE)
        x = rotate_tail_by(x, cosine[None, :], -sine[None, :], first, _BLOCK_H, _TILE)
    scaled, factors = scale_rows(x, smallest_amax, True)  # [block_h, _TILE], [block_h]
    # The heads of a group are contiguous; the groups follow each other.
    group = head // group_heads
    row = (group * num_tokens + token) * group_heads + head % group_heads
    out_row = values + row * D
    tl.store(out_row[:, None] + column, float_to_e4m3(scaled, NATIVE), mask=real[:, None])

    factors = tl.where(real, factors, 0.0)
    if scales.dtype.element_ty == tl.uint8:
        # One byte of the word that packs four tiles' scales.
        at = ((head * (TILES // 4) + tile // 4) * padded + token) * 4 + tile % 4
        tl.store(scales + at, (factors.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=in_heads)
    else:
        tl.store(scales + (head * TILES + tile) * padded + token, factors, mask=in_heads)
