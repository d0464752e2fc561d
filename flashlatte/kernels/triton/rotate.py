"""Rotary embedding: of the last numbers of rows in registers, and of whole rows in memory."""

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
    """Turn pairs (2i, 2i + 1) of the last ROPE numbers of float32 x [ROWS, D] by the table's row of ``position``.

    The table has cosines, then sines. A position outside of it takes the nearest. INVERSE turns back.
    """
    pair = (tl.arange(0, D // 2) - (D - ROPE) // 2)[None, :]
    cosine, sine = angles(cos_sin, position, num_positions, pair, ROPE)
    return turn_tail(x, cosine, -sine if INVERSE else sine, D - ROPE, ROWS, D)


@triton.jit
def angles(cos_sin, position, num_positions, pair, ROPE: tl.constexpr):
    """Cosines and sines of a tensor of pairs; 1 and 0 of pairs below 0."""
    row = cos_sin + tl.minimum(tl.maximum(position, 0), num_positions - 1).to(tl.int64) * ROPE
    cosine = tl.load(row + pair, mask=pair >= 0, other=1.0)
    return cosine, tl.load(row + ROPE // 2 + pair, mask=pair >= 0, other=0.0)


@triton.jit
def turn_tail(x, cosine, sine, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Turn pairs of x [ROWS, D] from column ``first`` on by cosines and sines [1, D // 2]."""
    a, b = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))  # [ROWS, D / 2]
    turned = (tl.arange(0, D // 2) >= first // 2)[None, :]
    # Selected, as an angle of 0 would make NaN of an infinity's neighbour.
    a, b = tl.where(turned, a * cosine - b * sine, a), tl.where(turned, b * cosine + a * sine, b)
    return tl.reshape(tl.join(a, b), [ROWS, D])


@triton.jit
def rotate_rows(
    x_rows,
    out_rows,
    there,
    cosine,
    sine,
    PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Rotate the rows that are ``there`` by float32 cosines and sines [1, BLOCK_PAIRS].

    Each row has 2 · PAIRS numbers. ``x_rows`` and ``out_rows``, pointers [BLOCK_H, 1] to where rows begin, may be the
    same: each number is read before it is written.
    """
    if INTERLEAVED:
        # Whole rows: by a load of one number of each pair, a warp would take one of each of 32 rows at a time.
        column = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        mask = there & (column < 2 * PAIRS)
        # [BLOCK_H, BLOCK_PAIRS, 2]
        pairs = tl.reshape(tl.load(x_rows + column, mask=mask, other=0.0), [BLOCK_H, BLOCK_PAIRS, 2])
        a, b = tl.split(to_float32(pairs, INTERPRETED))
        turned = from_float32(
            tl.join(a * cosine - b * sine, b * cosine + a * sine), out_rows.dtype.element_ty, INTERPRETED
        )
        tl.store(out_rows + column, tl.reshape(turned, [BLOCK_H, 2 * BLOCK_PAIRS]), mask=mask)
    else:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        mask = there & (pair < PAIRS)
        # [BLOCK_H, BLOCK_PAIRS]
        a = to_float32(tl.load(x_rows + pair, mask=mask, other=0.0), INTERPRETED)
        b = to_float32(tl.load(x_rows + PAIRS + pair, mask=mask, other=0.0), INTERPRETED)
        tl.store(
            out_rows + pair, from_float32(a * cosine - b * sine, out_rows.dtype.element_ty, INTERPRETED), mask=mask
        )
        x = from_float32(b * cosine + a * sine, out_rows.dtype.element_ty, INTERPRETED)
        tl.store(out_rows + PAIRS + pair, x, mask=mask)
