"""Rotary embedding of a row's last numbers, neighbours in pairs, in registers."""

from __future__ import annotations

import triton
import triton.language as tl


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
    a, b = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))  # [ROWS, D / 2]
    cosine, sine = load_tail(cos_sin, position, num_positions, D, ROPE)
    if INVERSE:
        sine = -sine
    return tl.reshape(tl.join(a * cosine - b * sine, b * cosine + a * sine), [ROWS, D])


@triton.jit
def load_tail(cos_sin, position, num_positions, D: tl.constexpr, ROPE: tl.constexpr):
    """Cosines and sines [1, D / 2] of each pair of a row; 1 and 0 before the last ROPE numbers."""
    pair = tl.arange(0, D // 2) - (D - ROPE) // 2
    row = cos_sin + tl.minimum(tl.maximum(position, 0), num_positions - 1).to(tl.int64) * ROPE
    cosine = tl.load(row + pair, mask=pair >= 0, other=1.0)
    sine = tl.load(row + ROPE // 2 + pair, mask=pair >= 0, other=0.0)
    return cosine[None, :], sine[None, :]
