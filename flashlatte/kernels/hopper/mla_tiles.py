"""Tiles in shared memory of the MLA kernels, and the barriers that synchronize producer and consumers.

A CTA processes 64 query rows. Its output, 64 × 512 float32, fills half of the SM's registers, so each of two consumers
of four warps holds half of the columns. Keys are loaded in blocks of 64, two per step: the even consumer computes the
scores of block 0, the odd one those of block 1. Keys and values are the same bytes. *Left* and *right* are columns 0 to
255 and 256 to 511 of a row, *rope* columns 512 to 575.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import FIRST_FREE, allocate_mbarrier

# Query rows of a CTA, and keys of a block: the M of a WGMMA.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
# Arguments of ``half_of``.
LEFT = gl.constexpr(0)
RIGHT = gl.constexpr(1)

# Layouts of scores [64, 64] and of half of the output [64, 256], and of their rows and columns.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SCORE_COLS = gl.constexpr(gl.SliceLayout(0, SCORES))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUT))
OUTPUT_COLS = gl.constexpr(gl.SliceLayout(0, OUTPUT))
# Queries in registers, as an operand of the scores.
Q_OPERAND = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
# Threads of four warps over a tile [64, n] in shared memory, 16 bytes each.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# Named barriers. Half of a block is empty: the consumer that reads it signals the producer.
K0_LEFT_EMPTY = gl.constexpr(FIRST_FREE)
K0_RIGHT_EMPTY = gl.constexpr(FIRST_FREE + 1)
K1_RIGHT_EMPTY = gl.constexpr(FIRST_FREE + 2)
K1_LEFT_EMPTY = gl.constexpr(FIRST_FREE + 3)
# Between the consumers: P and row_max of block 0 (even to odd); row_max of block 1, P of block 1 (odd to even).
# Operations may use the barriers OWN_BARRIERS to OWN_BARRIERS + 3.
OWN_BARRIERS = FIRST_FREE + 4
P0_FULL = gl.constexpr(FIRST_FREE + 8)
ROW_MAX1_FULL = gl.constexpr(FIRST_FREE + 9)
P1_FULL = gl.constexpr(FIRST_FREE + 10)


class LatentTile(NamedTuple):
    """64 rows of queries or keys in shared memory: tiles, or their offsets in bytes."""

    left: Any  # [1, 64, 256]
    right: Any
    rope: Any  # [1, 64, 64]; without rope, any other tile


class MlaTiles(NamedTuple):
    """Tiles in shared memory.

    Each tile of two-byte elements has a leading axis of size 1. Consumers index it with ``zero``, a counter shifted
    right by 30, which the compiler cannot prove to be 0: otherwise it would hoist the matrix descriptors of all tiles
    out of the main loop and spill them.
    """

    q: LatentTile
    k0: LatentTile
    k1: LatentTile
    p0: Any  # [1, 64, 64], P of block 0
    p1: Any
    row_max0: Any  # float32 [64], what p0 and p1 are relative to
    row_max1: Any
    row_sum0: Any  # float32 [64], of the even and of the odd consumer
    row_sum1: Any


class HalfFullBarriers(NamedTuple):
    """mbarriers on which the copies of a block's halves complete."""

    left: Any
    right: Any


class QuarterFullBarriers(NamedTuple):
    """mbarriers on which the copies of a block's quarters of the latent complete, and of the mask of its keys. RoPE
    columns complete on that of quarter 3."""

    quarter0: Any
    quarter1: Any
    quarter2: Any
    quarter3: Any
    mask: Any


class FullBarriers(NamedTuple):
    """mbarriers on which the copies of the queries and of the blocks complete."""

    q: Any
    k0: HalfFullBarriers
    k1: HalfFullBarriers


@gluon.jit
def half_of(block, SIDE: gl.constexpr):
    """The left or the right half of a ``LatentTile`` or of ``HalfFullBarriers``."""
    if SIDE == LEFT:
        return block.left
    else:
        return block.right


@gluon.jit
def allocate_half(DTYPE: gl.constexpr):
    """A tile for half of 64 rows, [1, 64, 256]."""
    return gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], SWIZZLED)


@gluon.jit
def allocate_square(DTYPE: gl.constexpr):
    """A tile for the rope of 64 rows or for P of a block, [1, 64, 64]."""
    return gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], SWIZZLED)


@gluon.jit
def allocate_rows(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr):
    """Tiles for 64 rows."""
    left = allocate_half(DTYPE)
    right = allocate_half(DTYPE)
    rope = allocate_square(DTYPE) if HAS_ROPE else left
    return LatentTile(left, right, rope)


@gluon.jit
def allocate_vector(DTYPE: gl.constexpr):
    """One element per row, [64]."""
    return gl.allocate_shared_memory(DTYPE, [ROWS], _VECTOR)


@gluon.jit
def allocate_tiles(q, k0, k1, p0, p1):
    """``MlaTiles`` with these tiles, and with newly allocated vectors that the consumers exchange."""
    return MlaTiles(
        q,
        k0,
        k1,
        p0,
        p1,
        allocate_vector(gl.float32),
        allocate_vector(gl.float32),
        allocate_vector(gl.float32),
        allocate_vector(gl.float32),
    )


@gluon.jit
def allocate_quarter_barriers():
    """``QuarterFullBarriers`` for copies by four warps."""
    return QuarterFullBarriers(
        allocate_mbarrier(128),
        allocate_mbarrier(128),
        allocate_mbarrier(128),
        allocate_mbarrier(128),
        allocate_mbarrier(),
    )


@gluon.jit
def allocate_full_barriers(
    Q_COUNT: gl.constexpr, HALF_COUNT: gl.constexpr, HALVES_COPIED: gl.constexpr = 2, BLOCKS: gl.constexpr = 2
):
    """Allocate ``FullBarriers`` that complete after Q_COUNT arrivals for the queries and HALF_COUNT for half of a
    block.

    A half without copies shares the mbarrier of another one, because an unused mbarrier is harmful
    (``allocate_mbarrier``).

    Args:
        HALVES_COPIED: halves of a block that receive copies: both (2), only the right one (1), or none (0).
        BLOCKS: blocks of a step.
    """
    q = allocate_mbarrier(Q_COUNT)
    k0 = _allocate_half_full_barriers(q, HALF_COUNT, HALVES_COPIED)
    k1 = k0
    if BLOCKS == 2:
        k1 = _allocate_half_full_barriers(q, HALF_COUNT, HALVES_COPIED)
    return FullBarriers(q, k0, k1)


@gluon.jit
def _allocate_half_full_barriers(q, COUNT: gl.constexpr, HALVES_COPIED: gl.constexpr):
    right = q
    if HALVES_COPIED > 0:
        right = allocate_mbarrier(COUNT)
    left = right
    if HALVES_COPIED == 2:
        left = allocate_mbarrier(COUNT)
    return HalfFullBarriers(left, right)


@gluon.jit
def of_block(odd, of_block0, of_block1):
    """A tile or an mbarrier of block 1 if ``odd``, else of block 0."""
    # Triton refuses a conditional expression of tiles.
    if odd == 1:  # noqa: SIM108
        chosen = of_block1
    else:
        chosen = of_block0
    return chosen
