"""Tiles and barriers of dense decode: those of ``mla_tiles``, and what only this kernel has."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import (
    OWN_BARRIERS,
    LatentTile,
    allocate_half,
    allocate_square,
    allocate_tiles,
)

# Keys of a step, which takes two blocks.
PAIR = gl.constexpr(128)

# Named barriers. The queries may be replaced: both consumers to the producer.
Q_EMPTY = gl.constexpr(OWN_BARRIERS)
# P of block 0 may lie where the rope of the queries was: the odd consumer, which has it in registers, to the even one.
Q_ROPE_EMPTY = gl.constexpr(OWN_BARRIERS + 1)


@gluon.jit
def allocate(DTYPE: gl.constexpr, PLAN: gl.constexpr):
    q_left = allocate_half(DTYPE)
    q_right = allocate_half(DTYPE)
    k0_left = allocate_half(DTYPE)
    k0_right = allocate_half(DTYPE)
    k1_left = allocate_half(DTYPE)
    k1_right = allocate_half(DTYPE)
    p0 = allocate_square(DTYPE)
    p1 = allocate_square(DTYPE)
    # The consumers take the rope of the queries into registers when an item begins, so P can lie on it. Beside a
    # producer that casts they have too few: P of block 0 lies on that block's rope, whose last reader writes it.
    q_rope = p0
    k0_rope = p0
    k1_rope = p0
    if PLAN.has_rope:
        if PLAN.one_byte:
            q_rope = allocate_square(DTYPE)
        else:
            k0_rope = allocate_square(DTYPE)
        k1_rope = allocate_square(DTYPE)
    return allocate_tiles(
        LatentTile(q_left, q_right, q_rope),
        LatentTile(k0_left, k0_right, k0_rope),
        LatentTile(k1_left, k1_right, k1_rope),
        p0,
        p1,
    )
