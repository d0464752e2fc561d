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
    pair = (tl.arange(0, D // 2) - (D - ROPE) // 2)[None, :]
    turned = pair >= 0
    row = cos_sin + tl.minimum(tl.maximum(position, 0), num_positions - 1).to(tl.int64) * ROPE
    cosine = tl.load(row + pair, mask=turned, other=1.0)
    sine = tl.load(row + ROPE // 2 + pair, mask=turned, other=0.0)
    if INVERSE:
        sine = -sine
    # Selected, as an angle of 0 would make NaN of an infinity's neighbour.
    first = tl.where(turned, a * cosine - b * sine, a)
    second = tl.where(turned, b * cosine + a * sine, b)
    return tl.reshape(tl.join(first, second), [ROWS, D])
