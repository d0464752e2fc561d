"""Tiles and barriers of sparse decode, in addition to those of ``mla_tiles``."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper import clusters
from flashlatte.kernels.hopper.mla_tiles import (
    HALF,
    KEYS,
    OWN_BARRIERS,
    SWIZZLED,
    LatentTile,
    allocate_half,
    allocate_square,
    allocate_tiles,
    allocate_vector,
)
from flashlatte.runtime.gluon_compat import reinterpret

# Half of the output [64, 256], as two products of 128 columns: kernels with 16 warps start with 128 registers per
# thread, for which ptxas rejects a WGMMA of 256 columns.
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUT))

# Named barriers: the producer signals the consumer that computes the scores that half of a block is full.
K0_LEFT_FULL = gl.constexpr(OWN_BARRIERS)
K0_RIGHT_FULL = gl.constexpr(OWN_BARRIERS + 1)
K1_RIGHT_FULL = gl.constexpr(OWN_BARRIERS + 2)
K1_LEFT_FULL = gl.constexpr(OWN_BARRIERS + 3)

# Cache formats, by their encoding.
PLAIN = gl.constexpr(0)
V32 = gl.constexpr(1)
MODEL1 = gl.constexpr(2)
V41 = gl.constexpr(3)
V41_FP4 = gl.constexpr(4)


def producer_warps(cache_format: int) -> int:
    """Warps of the producer. With fewer warps, each has more registers for loads in flight."""
    return 8 if cache_format == PLAIN.value else 4


@gluon.constexpr_function
def halves_copied(cache_format, has_rope):
    """Halves of a block that receive copies by cp.async: with scales, at most the right one."""
    return {PLAIN.value: 2, V32.value: int(has_rope), MODEL1.value: 1}.get(int(cache_format), 0)


class Masks(NamedTuple):
    """int32 [64] for each block; 0 for invalid indices."""

    block0: Any
    block1: Any


@gluon.jit
def allocate(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr, CLUSTER: gl.constexpr):
    if CLUSTER:
        # One allocation, so that ``clusters`` can compute the offsets between them.
        k = gl.allocate_shared_memory(DTYPE, [4, KEYS, HALF], SWIZZLED)
        k0_left = reinterpret(k.index(clusters.K0_LEFT), DTYPE, [1, KEYS, HALF], SWIZZLED)
        k0_right = reinterpret(k.index(clusters.K0_RIGHT), DTYPE, [1, KEYS, HALF], SWIZZLED)
        k1_left = reinterpret(k.index(clusters.K1_LEFT), DTYPE, [1, KEYS, HALF], SWIZZLED)
        k1_right = reinterpret(k.index(clusters.K1_RIGHT), DTYPE, [1, KEYS, HALF], SWIZZLED)
    else:
        k0_left = allocate_half(DTYPE)
        k0_right = allocate_half(DTYPE)
        k1_left = allocate_half(DTYPE)
        k1_right = allocate_half(DTYPE)
    q_left = allocate_half(DTYPE)
    q_right = allocate_half(DTYPE)
    p0 = allocate_square(DTYPE)
    p1 = allocate_square(DTYPE)
    q_rope = p1
    k0_rope = p0
    k1_rope = p1
    if HAS_ROPE:
        # P of block 0 overwrites the rope of block 0: it is live only between the last read of that rope and its
        # refill.
        q_rope = allocate_square(DTYPE)
        k1_rope = allocate_square(DTYPE)
    masks = Masks(allocate_vector(gl.int32), allocate_vector(gl.int32))
    q = LatentTile(q_left, q_right, q_rope)
    k0 = LatentTile(k0_left, k0_right, k0_rope)
    k1 = LatentTile(k1_left, k1_right, k1_rope)
    return allocate_tiles(q, k0, k1, p0, p1), masks
