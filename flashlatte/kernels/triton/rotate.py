"""Rotary embedding in Triton: of the last elements of rows in registers, and of rows in memory."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import row_alignment
from flashlatte.kernels.triton.fp8 import from_float32, to_float32
from flashlatte.runtime.kernel_records import Constant, ElementPointer, Int64, Pointer
from flashlatte.runtime.strides import stride_in_use


class TokenRotation(NamedTuple):
    """The rotation of tokens: a table [num_positions, 2 · pairs] of cosines, then sines; and each token's row in it.

    ``table_stride`` is in units of ``align`` elements.
    """

    cos_sin: Pointer
    table_stride: Int64
    align: Constant
    num_positions: Int64
    positions: ElementPointer
    position_stride: Int64


def rotation_of(cos_sin: torch.Tensor, positions: torch.Tensor) -> TokenRotation:
    """Make a ``TokenRotation`` from tensors."""
    align = row_alignment(cos_sin, 0)
    table_stride = stride_in_use(cos_sin, 0) // align
    return TokenRotation(cos_sin, table_stride, align, cos_sin.shape[0], positions, positions.stride(0))


@triton.jit
def load_position(rotation, token):
    return tl.load(rotation.positions + token * rotation.position_stride).to(tl.int64)


@triton.jit
def load_rotation(rotation, token, pair, PAIRS: tl.constexpr):
    """Cosines and sines of a token, float32, for a tensor of pairs. Positions are clamped to the table."""
    position = load_position(rotation, token)
    position = tl.minimum(tl.maximum(position, 0), rotation.num_positions - 1)
    row = rotation.cos_sin + position * rotation.table_stride * rotation.align
    cosine = to_float32(tl.load(row + pair, mask=pair < PAIRS, other=0.0))
    return cosine, to_float32(tl.load(row + PAIRS + pair, mask=pair < PAIRS, other=0.0))


@triton.jit
def rotate_tail(x, cos_sin, position, num_positions, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    """Rotate pairs (2i, 2i + 1) of the last ROPE elements of float32 x [ROWS, D] by the table row of ``position``.

    A table row holds cosines, then sines. Positions are clamped to the table.
    """
    pair = (tl.arange(0, D // 2) - (D - ROPE) // 2)[None, :]
    cosine, sine = angles(cos_sin, position, num_positions, pair, ROPE)
    return rotate_tail_by(x, cosine, sine, D - ROPE, ROWS, D)


@triton.jit
def angles(cos_sin, position, num_positions, pair, ROPE: tl.constexpr):
    """Cosines and sines for a tensor of pair indices; 1 and 0 for negative indices."""
    row = cos_sin + tl.minimum(tl.maximum(position, 0), num_positions - 1).to(tl.int64) * ROPE
    cosine = tl.load(row + pair, mask=pair >= 0, other=1.0)
    return cosine, tl.load(row + ROPE // 2 + pair, mask=pair >= 0, other=0.0)


@triton.jit
def rotate_tail_by(x, cosine, sine, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Rotate pairs of x [ROWS, D] from column ``first`` on by cosines and sines [1, D // 2]."""
    a, b = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))  # [ROWS, D / 2]
    rotated = (tl.arange(0, D // 2) >= first // 2)[None, :]
    # A select, because rotating by 0 would turn the neighbor of an infinity into NaN.
    a, b = tl.where(rotated, a * cosine - b * sine, a), tl.where(rotated, b * cosine + a * sine, b)
    return tl.reshape(tl.join(a, b), [ROWS, D])


@triton.jit
def rotate_rows(
    x_rows,
    out_rows,
    in_use,
    cosine,
    sine,
    PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate the rows ``in_use`` by float32 cosines and sines [1, BLOCK_PAIRS].

    Each row has 2 · PAIRS elements. ``x_rows`` and ``out_rows`` [BLOCK_H, 1] are pointers to the rows and may be the
    same: each element is read before it is written.
    """
    if INTERLEAVED:
        # Load whole rows: loads of one element of each pair would access 32 rows per warp, with one element each.
        column = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        mask = in_use & (column < 2 * PAIRS)
        # [BLOCK_H, BLOCK_PAIRS, 2]
        pairs = tl.reshape(tl.load(x_rows + column, mask=mask, other=0.0), [BLOCK_H, BLOCK_PAIRS, 2])
        a, b = tl.split(to_float32(pairs))
        rotated = from_float32(tl.join(a * cosine - b * sine, b * cosine + a * sine), out_rows.dtype.element_ty)
        tl.store(out_rows + column, tl.reshape(rotated, [BLOCK_H, 2 * BLOCK_PAIRS]), mask=mask)
    else:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        mask = in_use & (pair < PAIRS)
        rotate_pairs(x_rows, out_rows, pair, PAIRS + pair, cosine, sine, mask)  # [BLOCK_H, BLOCK_PAIRS]


@triton.jit
def pair_columns(pair, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The columns of the two elements of pairs."""
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    else:
        return pair, pair + PAIRS


@triton.jit
def rotate_pairs(row, out_row, first, second, cosine, sine, mask):
    """Rotate the pairs of columns ``first`` and ``second`` of rows; returns their elements as rounded in ``out_row``,
    which may be ``row``."""
    a = to_float32(tl.load(row + first, mask=mask, other=0.0))
    b = to_float32(tl.load(row + second, mask=mask, other=0.0))
    x = from_float32(a * cosine - b * sine, out_row.dtype.element_ty)
    y = from_float32(b * cosine + a * sine, out_row.dtype.element_ty)
    tl.store(out_row + first, x, mask=mask)
    tl.store(out_row + second, y, mask=mask)
    return x, y
