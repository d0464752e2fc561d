"""``index_query`` in Triton: one program rotates, transforms and quantizes some heads of a token."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import cdiv
from flashlatte.kernels.triton.fp4 import to_mxfp4
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, from_float32, to_float32
from flashlatte.kernels.triton.rotate import angles
from flashlatte.kernels.triton.row_scales import scale_rows
from flashlatte.kernels.triton.rows import HeadRows, TokenRows, head_row, head_rows, token_row, token_rows
from flashlatte.ops.index_query.reference import IndexQueryParams
from flashlatte.runtime.kernel_records import ElementPointer, Int64, Pointer
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import INTERPRETED, kernel

# Heads and warps of a program. For e2m1, more elements per thread need fewer instructions per element: 54.7 µs instead
# of 62.9 (index_query_mxfp4, t8192-h64).
HEADS, WARPS, WARPS_OF_FOUR_BITS = 32, 4, 2
# Each program builds the matrix.
HADAMARD_HEADS = 64


class QueryRotation(NamedTuple):
    """The row of cos_sin [num_positions, ROPE] of each token; None: q is not rotated."""

    cos_sin: Pointer
    num_positions: Int64
    positions: ElementPointer
    position_stride: Int64


class IndexQueryOutputs(NamedTuple):
    """e4m3 codes, or e2m1 codes with block_scales; and the folded weights, all contiguous."""

    codes: Pointer
    block_scales: Pointer
    weights: Pointer


class IndexQueryConfig(NamedTuple):
    """The compile-time constants of the kernel. Columns ``rope_at`` to ``rope_at + rope`` of ``head_dim`` are rotated;
    a program has ``block_h`` heads."""

    head_dim: int
    rope: int
    rope_at: int
    interleaved: bool
    hadamard: bool
    power_of_two: bool
    native: bool
    block_h: int


def index_query(params: IndexQueryParams) -> None:
    q, cos_sin, positions, scales = params.q, params.cos_sin, params.positions, params.scales
    tokens, heads, head_dim = q.shape
    num_positions, rope = (1, 0) if cos_sin is None else cos_sin.shape
    config = IndexQueryConfig(
        head_dim=head_dim,
        rope=rope,
        rope_at=0 if params.rope_first else head_dim - rope,
        interleaved=params.interleaved,
        hadamard=params.hadamard,
        power_of_two=params.scale_rounding == "power_of_two",
        native=converts_e4m3(q.device),
        block_h=HADAMARD_HEADS if params.hadamard else HEADS,
    )
    head_blocks = cdiv(heads, config.block_h)
    index_query_kernel[(tokens * head_blocks,)](
        head_rows(q),
        token_rows(params.weights, align=1),
        QueryRotation(cos_sin, num_positions, positions, 0 if positions is None else stride_in_use(positions, 0)),
        IndexQueryOutputs(params.values, scales, params.folded),
        smallest_amax=params.smallest_amax,
        weight_scale=params.weight_scale,
        heads=heads,
        head_blocks=head_blocks,
        CONFIG=config,
        num_warps=WARPS if scales is None or params.hadamard else WARPS_OF_FOUR_BITS,
    )


@kernel
def index_query_kernel(
    q: HeadRows,
    weights: TokenRows,
    rotation: QueryRotation,
    outputs: IndexQueryOutputs,
    smallest_amax: tl.float32,
    weight_scale: tl.float32,
    heads: tl.int32,
    head_blocks: tl.int32,
    CONFIG: tl.constexpr,
):
    D: tl.constexpr = CONFIG.head_dim
    ROPE: tl.constexpr = CONFIG.rope
    ROPE_AT: tl.constexpr = CONFIG.rope_at
    BLOCK_H: tl.constexpr = CONFIG.block_h
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = head < heads
    column = tl.arange(0, D)
    q_row = head_row(q, token, head)
    # MXFP4 is instruction-bound: skip the rotation of NoPE columns.
    APART: tl.constexpr = (
        CONFIG.interleaved and not CONFIG.hadamard and 2 * ROPE == D and ROPE_AT == ROPE and ROPE % 32 == 0
    )
    if outputs.block_scales is not None and rotation.cos_sin is not None and APART:
        out_head = token * heads + head
        half = tl.arange(0, ROPE)[None, :]
        still = to_float32(tl.load(q_row[:, None] + half, mask=inside[:, None], other=0.0))
        tail = to_float32(tl.load(q_row[:, None] + ROPE + half, mask=inside[:, None], other=0.0))
        position = tl.load(rotation.positions + token * rotation.position_stride).to(tl.int64)
        cosine, sine = angles(
            rotation.cos_sin, position, rotation.num_positions, tl.arange(0, ROPE // 2)[None, :], ROPE
        )
        a, b = tl.split(tl.reshape(tail, [BLOCK_H, ROPE // 2, 2]))  # [BLOCK_H, ROPE / 2]
        tail = tl.reshape(tl.join(a * cosine - b * sine, b * cosine + a * sine), [BLOCK_H, ROPE])
        store_mxfp4(still, outputs, out_head, inside, 0, D)
        store_mxfp4(tail, outputs, out_head, inside, ROPE, D)
        weight = to_float32(tl.load(token_row(weights, token) + head, mask=inside, other=0.0))
        tl.store(outputs.weights + out_head, weight * weight_scale, mask=inside)
        return
    # [BLOCK_H, D]
    x = to_float32(tl.load(q_row[:, None] + column[None, :], mask=inside[:, None], other=0.0))
    if rotation.cos_sin is not None:
        pairs: tl.constexpr = ROPE // 2
        position = tl.load(rotation.positions + token * rotation.position_stride).to(tl.int64)
        row = rotation.cos_sin + tl.minimum(tl.maximum(position, 0), rotation.num_positions - 1) * ROPE
        if CONFIG.interleaved:
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
            x = x * cosine[None, :] + to_float32(other) * tl.where(offset < pairs, -sine, sine)[None, :]
    if CONFIG.hadamard:
        rounded = from_float32(x, q.start.dtype.element_ty)
        signs = tl.where(parity(column[:, None] & column[None, :]) == 1, -1.0, 1.0)
        if INTERPRETED:
            x = tl.dot(to_float32(rounded), signs)
        elif q.start.dtype.element_ty == tl.float32:
            x = tl.dot(rounded, signs, input_precision="ieee")
        else:
            x = tl.dot(rounded, signs.to(q.start.dtype.element_ty))
        x = x * D**-0.5
    weight = to_float32(tl.load(token_row(weights, token) + head, mask=inside, other=0.0))
    out_head = token * heads + head
    if outputs.block_scales is not None:
        store_mxfp4(x, outputs, out_head, inside, 0, D)
        tl.store(outputs.weights + out_head, weight * weight_scale, mask=inside)
        return
    scaled, scales = scale_rows(x, smallest_amax, CONFIG.power_of_two)
    codes = float_to_e4m3(scaled, CONFIG.native)
    tl.store(outputs.codes + out_head[:, None] * D + column[None, :], codes, mask=inside[:, None])
    tl.store(outputs.weights + out_head, weight * scales * weight_scale, mask=inside)


@triton.jit
def store_mxfp4(x, outputs, out_head, inside, FIRST: tl.constexpr, D: tl.constexpr):
    """Quantize and store columns FIRST to FIRST + WIDTH - 1 of some heads, float32 x [BLOCK_H, WIDTH]."""
    WIDTH: tl.constexpr = x.shape[1]
    packed, exponents = to_mxfp4(x, x.shape[0], WIDTH)
    byte = FIRST // 2 + tl.arange(0, WIDTH // 2)[None, :]
    group = FIRST // 32 + tl.arange(0, WIDTH // 32)[None, :]
    tl.store(outputs.codes + out_head[:, None] * (D // 2) + byte, packed, mask=inside[:, None])
    tl.store(outputs.block_scales + out_head[:, None] * (D // 32) + group, exponents, mask=inside[:, None])


@triton.jit
def parity(bits):
    """The parity of integers below 256."""
    bits ^= bits >> 4
    bits ^= bits >> 2
    return (bits ^ (bits >> 1)) & 1
