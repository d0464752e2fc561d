"""Rotary embedding in Triton: of the last elements of rows in registers, and of whole rows in memory."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import from_float32, to_float32


@triton.jit
def rotate_tail(
    x,
    cos_sin,
    position,
    num_positions,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    INVERSE: tl.constexpr = False,
):
    """Rotate pairs (2i, 2i + 1) of the last ROPE elements of float32 x [ROWS, D] by the table row of ``position``.

    A table row holds cosines, then sines. Positions are clamped to the table. INVERSE rotates back.
    """
    pair = (tl.arange(0, D // 2) - (D - ROPE) // 2)[None, :]
    cosine, sine = angles(cos_sin, position, num_positions, pair, ROPE)
    return rotate_tail_by(x, cosine, -sine if INVERSE else sine, D - ROPE, ROWS, D)


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
    # A select, because rotating by 0 would turn the neighbour of an infinity into NaN.
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
    INTERPRETED: tl.constexpr,
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
        a, b = tl.split(to_float32(pairs, INTERPRETED))
        rotated = from_float32(
            tl.join(a * cosine - b * sine, b * cosine + a * sine), out_rows.dtype.element_ty, INTERPRETED
        )
        tl.store(out_rows + column, tl.reshape(rotated, [BLOCK_H, 2 * BLOCK_PAIRS]), mask=mask)
    else:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        mask = in_use & (pair < PAIRS)
        # [BLOCK_H, BLOCK_PAIRS]
        a = to_float32(tl.load(x_rows + pair, mask=mask, other=0.0), INTERPRETED)
        b = to_float32(tl.load(x_rows + PAIRS + pair, mask=mask, other=0.0), INTERPRETED)
        tl.store(
            out_rows + pair, from_float32(a * cosine - b * sine, out_rows.dtype.element_ty, INTERPRETED), mask=mask
        )
        x = from_float32(b * cosine + a * sine, out_rows.dtype.element_ty, INTERPRETED)
        tl.store(out_rows + PAIRS + pair, x, mask=mask)
