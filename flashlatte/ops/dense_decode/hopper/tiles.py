"""Tiles and barriers of dense decode, in addition to those of ``mla_tiles``."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import OWN_BARRIERS, LatentTile, allocate_half, allocate_square, allocate_tiles

# Keys of a step: two blocks.
STEP_KEYS = gl.constexpr(128)

# Named barriers. The queries are empty: both consumers to the producer.
Q_EMPTY = gl.constexpr(OWN_BARRIERS)
# P of block 0 may overwrite the rope of the queries: the odd consumer, which has loaded it into registers, to the even
# one.
Q_ROPE_EMPTY = gl.constexpr(OWN_BARRIERS + 1)


@gluon.jit
def allocate(DTYPE: gl.constexpr, CONFIG: gl.constexpr):
    q_left = allocate_half(DTYPE)
    q_right = allocate_half(DTYPE)
    k0_left = allocate_half(DTYPE)
    k0_right = allocate_half(DTYPE)
    k1_left = allocate_half(DTYPE)
    k1_right = allocate_half(DTYPE)
    p0 = allocate_square(DTYPE)
    p1 = allocate_square(DTYPE)
    # The consumers load the rope of the queries into registers at the start of a request, so P can overwrite it. With a
    # producer that casts they have too few registers: P of block 0 overwrites the rope of that block, whose last reader
    # writes P.
    q_rope = p0
    k0_rope = p0
    k1_rope = p0
    if CONFIG.has_rope:
        if CONFIG.one_byte:
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
