"""Shared memory, layouts and barriers of the e4m3 kernels.

Rows of e4m3 values are stored as pairs of bytes, because TMA descriptors have elements of two bytes. The latent has a
128-byte swizzle, the rope a 64-byte swizzle.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.barriers import FIRST_FREE, allocate_mbarriers
from flashlatte.kernels.hopper.mla_tiles import KEYS, LATENT, ROPE, ROWS, SWIZZLED
from flashlatte.kernels.hopper.shared_memory import find_tiles, offset_of
from flashlatte.runtime.gluon_compat import reinterpret

# Blocks of the ring: two steps of two. Block b of step s is in slot 2 · (s % 2) + b.
SLOTS = gl.constexpr(4)

# Results of e4m3 products: scores [64 rows, 64 keys], and a quarter of a consumer's output [64 columns, 64 rows].
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SCORE_COLS = gl.constexpr(gl.SliceLayout(0, SCORES))
# Values in registers: the left operand of the output.
VALUES = gl.constexpr(gl.DotOperandLayout(0, SCORES, 4))

_LATENT = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
_SQUARE = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
_ROPE_PAIRS = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# Named barriers. First of four: a slot is empty (both consumers to the loader).
SLOT_EMPTY = gl.constexpr(FIRST_FREE)
# Both consumers wait: at the end of a tile of queries, and, if they store the queries, when these are stored.
TILE = gl.constexpr(FIRST_FREE + 4)
# Between the consumers: row_max of block 0 (even to odd) and of block 1 (odd to even); P of both, one barrier for even
# and one for odd steps, because the even consumer may be a step ahead of the odd one's wait.
ROW_MAX0_FULL = gl.constexpr(FIRST_FREE + 5)
ROW_MAX1_FULL = gl.constexpr(FIRST_FREE + 6)
P0_FULL = gl.constexpr(FIRST_FREE + 7)
P1_FULL = gl.constexpr(FIRST_FREE + 9)


class Fp8Rows(NamedTuple):
    """Rows of e4m3 values as pairs of bytes: [n, 64, 256] and [n, 64, 32]."""

    latent: Any
    rope: Any


class Fp8Tiles(NamedTuple):
    """Shared memory. Everything with a leading axis of 4 is indexed by slot.

    Attributes:
        q: one latent, and the rope as two terms.
        k: blocks of keys [4, 64, …].
        k_offset: bytes from the start of shared memory to ``k.latent``.
        p: e4m3 [4, 64 rows, 64 keys], keys in the order of ``ptx.e4m3_values``.
        alpha: float32 [4, 64], the factor of the output before P of the slot is added.
        row_max: float32 [4, 64], what P is relative to.
        row_sum0, row_sum1: float32 [64], of the even and of the odd consumer.
        q_scale: float32 [64], the scale of each query.
        full: mbarriers of the slots.
    """

    q: Fp8Rows
    k: Fp8Rows
    k_offset: Any
    p: Any
    alpha: Any
    row_max: Any
    row_sum0: Any
    row_sum1: Any
    q_scale: Any
    full: Any


@gluon.jit
def _allocate_rows(LATENTS: gl.constexpr, ROPES: gl.constexpr):
    return Fp8Rows(
        gl.allocate_shared_memory(gl.bfloat16, [LATENTS, ROWS, LATENT // 2], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [ROPES, ROWS, ROPE // 2], _ROPE_PAIRS),
    )


@gluon.jit
def allocate(ARRIVALS: gl.constexpr):
    """ARRIVALS: at the mbarrier of a slot when it is full."""
    k = _allocate_rows(SLOTS, SLOTS)
    q = _allocate_rows(1, 2)
    k_offset = offset_of(0, find_tiles((k.latent.index(0),)))
    # ``find_tiles`` has written where TMA will write.
    fence_async_shared()
    return Fp8Tiles(
        q,
        k,
        k_offset,
        gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, ROWS, KEYS], _SQUARE),
        gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], _VECTOR),
        gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], _VECTOR),
        gl.allocate_shared_memory(gl.float32, [ROWS], _VECTOR),
        gl.allocate_shared_memory(gl.float32, [ROWS], _VECTOR),
        gl.allocate_shared_memory(gl.float32, [ROWS], _VECTOR),
        allocate_mbarriers(SLOTS, ARRIVALS),
    )


@gluon.jit
def latent_of(rows, number):
    """The latents of a block, e4m3 [64, 512]."""
    return reinterpret(rows.latent.index(number), gl.float8e4nv, [ROWS, LATENT], _LATENT)


@gluon.jit
def rope_of(rows, number):
    """The ropes of a block, e4m3 [64, 64]."""
    return reinterpret(rows.rope.index(number), gl.float8e4nv, [ROWS, ROPE], _SQUARE)
