"""``index_query`` in Triton: one program rotates, transforms and quantises some heads of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import alignment_elements, cdiv
from flashlatte.kernels.triton.fp4 import to_mxfp4
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, from_float32, to_float32
from flashlatte.kernels.triton.rotate import angles
from flashlatte.kernels.triton.row_scales import scale_rows
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

# Heads and warps of a program. For e2m1, more elements per thread need fewer instructions per element: 54.7 µs instead
# of 62.9 (index_query_mxfp4, t8192-h64).
HEADS, WARPS, WARPS_OF_FOUR_BITS = 32, 4, 2
# Each program builds the matrix.
HADAMARD_HEADS = 64


def index_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    rope_first: bool,
    interleaved: bool,
    hadamard: bool,
    weight_scale: float,
    smallest_amax: float,
    scale_rounding: str,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    folded: torch.Tensor,
) -> None:
    tokens, heads, head_dim = q.shape
    rope_dim = 0 if cos_sin is None else cos_sin.shape[1]
    heads_at_once = HADAMARD_HEADS if hadamard else HEADS
    head_blocks = cdiv(heads, heads_at_once)
    strides = stride_in_use(q, 0), stride_in_use(q, 1)
    q_unit = alignment_elements(q, *strides)
    index_query_kernel[(tokens * head_blocks,)](
        q=q,
        weights=weights,
        cos_sin=cos_sin,
        positions=positions,
        values=values,
        block_scales=scales,
        folded=folded,
        smallest_amax=smallest_amax,
        weight_scale=weight_scale,
        heads=heads,
        head_blocks=head_blocks,
        num_positions=1 if cos_sin is None else cos_sin.shape[0],
        position_stride=0 if positions is None else stride_in_use(positions, 0),
        q_stride=strides[0] // q_unit,
        q_head_stride=strides[1] // q_unit,
        weight_stride=stride_in_use(weights, 0),
        D=head_dim,
        ROPE=rope_dim,
        ROPE_AT=0 if rope_first else head_dim - rope_dim,
        INTERLEAVED=interleaved,
        HADAMARD=hadamard,
        POWER_OF_TWO=scale_rounding == "power_of_two",
        Q_ALIGN=q_unit,
        NATIVE=converts_e4m3(q.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_H=heads_at_once,
        num_warps=WARPS if scales is None or hadamard else WARPS_OF_FOUR_BITS,
    )


@kernel(by_element=("positions",))
def index_query_kernel(
    q,
    weights,
    cos_sin,
    positions,
    values,
    block_scales,
    folded,
    smallest_amax: tl.float32,
    weight_scale: tl.float32,
    heads: tl.int32,
    head_blocks: tl.int32,
    num_positions: tl.int64,
    position_stride: tl.int64,
    q_stride: tl.int64,
    q_head_stride: tl.int64,
    weight_stride: tl.int64,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_AT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = head < heads
    column = tl.arange(0, D)
    q_row = q + (token * q_stride + head.to(tl.int64) * q_head_stride) * Q_ALIGN
    # MXFP4 is instruction-bound: skip the rotation of NoPE columns.
    APART: tl.constexpr = INTERLEAVED and not HADAMARD and 2 * ROPE == D and ROPE_AT == ROPE and ROPE % 32 == 0
    if block_scales is not None and cos_sin is not None and APART:
        out_head = token * heads + head
        half = tl.arange(0, ROPE)[None, :]
        still = to_float32(tl.load(q_row[:, None] + half, mask=inside[:, None], other=0.0), INTERPRETED)
        tail = to_float32(tl.load(q_row[:, None] + ROPE + half, mask=inside[:, None], other=0.0), INTERPRETED)
        position = tl.load(positions + token * position_stride).to(tl.int64)
        cosine, sine = angles(cos_sin, position, num_positions, tl.arange(0, ROPE // 2)[None, :], ROPE)
        a, b = tl.split(tl.reshape(tail, [BLOCK_H, ROPE // 2, 2]))  # [BLOCK_H, ROPE / 2]
        tail = tl.reshape(tl.join(a * cosine - b * sine, b * cosine + a * sine), [BLOCK_H, ROPE])
        store_mxfp4(still, values, block_scales, out_head, inside, 0, BLOCK_H, ROPE, D)
        store_mxfp4(tail, values, block_scales, out_head, inside, ROPE, BLOCK_H, ROPE, D)
        weight = to_float32(tl.load(weights + token * weight_stride + head, mask=inside, other=0.0), INTERPRETED)
        tl.store(folded + out_head, weight * weight_scale, mask=inside)
        return
    # [BLOCK_H, D]
    x = to_float32(tl.load(q_row[:, None] + column[None, :], mask=inside[:, None], other=0.0), INTERPRETED)
    if cos_sin is not None:
        pairs: tl.constexpr = ROPE // 2
        position = tl.load(positions + token * position_stride).to(tl.int64)
        row = cos_sin + tl.minimum(tl.maximum(position, 0), num_positions - 1) * ROPE
        if INTERLEAVED:
            # Adjacent elements are in the registers of one thread.
            a, b = tl.split(tl.reshape(x, [BLOCK_H, D // 2, 2]))  # [BLOCK_H, D / 2]
            pair = tl.arange(0, D // 2) - ROPE_AT // 2
            rotates = (pair >= 0) & (pair < pairs)
            cosine = tl.load(row + pair, mask=rotates, other=1.0)[None, :]
            sine = tl.load(row + pairs + pair, mask=rotates, other=0.0)[None, :]
            rotated_a = tl.where(rotates[None, :], a * cosine - b * sine, a)
            rotated_b = tl.where(rotates[None, :], b * cosine + a * sine, b)
            x = tl.reshape(tl.join(rotated_a, rotated_b), [BLOCK_H, D])
        else:
            offset = column - ROPE_AT
            rotates = (offset >= 0) & (offset < ROPE)
            partner = ROPE_AT + (offset + pairs) % ROPE
            cosine = tl.load(row + offset % pairs, mask=rotates, other=1.0)
            sine = tl.load(row + pairs + offset % pairs, mask=rotates, other=0.0)
            other = tl.load(q_row[:, None] + partner[None, :], mask=inside[:, None] & rotates[None, :], other=0.0)
            x = x * cosine[None, :] + to_float32(other, INTERPRETED) * tl.where(offset < pairs, -sine, sine)[None, :]
    if HADAMARD:
        rounded = from_float32(x, q.dtype.element_ty, INTERPRETED)
        signs = tl.where(parity(column[:, None] & column[None, :]) == 1, -1.0, 1.0)
        if INTERPRETED:
            x = tl.dot(to_float32(rounded, True), signs)
        elif q.dtype.element_ty == tl.float32:
            x = tl.dot(rounded, signs, input_precision="ieee")
        else:
            x = tl.dot(rounded, signs.to(q.dtype.element_ty))
        x = x * D**-0.5
    weight = to_float32(tl.load(weights + token * weight_stride + head, mask=inside, other=0.0), INTERPRETED)
    out_head = token * heads + head
    if block_scales is not None:
        store_mxfp4(x, values, block_scales, out_head, inside, 0, BLOCK_H, D, D)
        tl.store(folded + out_head, weight * weight_scale, mask=inside)
        return
    scaled, scales = scale_rows(x, smallest_amax, POWER_OF_TWO)
    codes = float_to_e4m3(scaled, NATIVE)
    tl.store(values + out_head[:, None] * D + column[None, :], codes, mask=inside[:, None])
    tl.store(folded + out_head, weight * scales * weight_scale, mask=inside)


@triton.jit
def store_mxfp4(
    x,
    values,
    scales,
    out_head,
    inside,
    FIRST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """Quantise and store columns FIRST to FIRST + WIDTH - 1 of some heads, float32 x [BLOCK_H, WIDTH]."""
    packed, exponents = to_mxfp4(x, BLOCK_H, WIDTH)
    byte = FIRST // 2 + tl.arange(0, WIDTH // 2)[None, :]
    group = FIRST // 32 + tl.arange(0, WIDTH // 32)[None, :]
    tl.store(values + out_head[:, None] * (D // 2) + byte, packed, mask=inside[:, None])
    tl.store(scales + out_head[:, None] * (D // 32) + group, exponents, mask=inside[:, None])


@triton.jit
def parity(bits):
    """The parity of integers below 256."""
    bits ^= bits >> 4
    bits ^= bits >> 2
    return (bits ^ (bits >> 1)) & 1
