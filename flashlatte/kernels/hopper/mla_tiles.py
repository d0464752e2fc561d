"""What the warps of an MLA kernel share: tiles in shared memory, and the barriers that pass them on.

A CTA has 64 query rows. Its output, 64 × 512 float32, is half of an SM's registers, so two consumers of four warps hold
half of its columns each. Keys come in blocks of 64, two at a time: the even consumer scores block 0, the odd one block
1. Keys and values are the same bytes. *Left* and *right* are columns 0 to 255 and 256 to 511 of a row, *rope* columns
512 to 575.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import FIRST_FREE, allocate_mbarrier

# Query rows of a CTA, and keys of a block: what one WGMMA takes.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
# Halves of a row, for ``half_of``.
LEFT = gl.constexpr(0)
RIGHT = gl.constexpr(1)

# Layouts of scores [64, 64] and of half an output [64, 256], and of their rows and columns.
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

# Named barriers. Half of a block may be filled again: its only reader, one of the consumers, to the producer.
K0_LEFT_EMPTY = gl.constexpr(FIRST_FREE)
K0_RIGHT_EMPTY = gl.constexpr(FIRST_FREE + 1)
K1_RIGHT_EMPTY = gl.constexpr(FIRST_FREE + 2)
K1_LEFT_EMPTY = gl.constexpr(FIRST_FREE + 3)
# Between the consumers: P of block 0 and its row_max are there (even to odd), row_max of block 1, P of block 1 (odd to
# even). An operation has the numbers from OWN_BARRIERS to OWN_BARRIERS + 3 for itself.
OWN_BARRIERS = FIRST_FREE + 4
P0_FULL = gl.constexpr(FIRST_FREE + 8)
ROW_MAX1_FULL = gl.constexpr(FIRST_FREE + 9)
P1_FULL = gl.constexpr(FIRST_FREE + 10)


class LatentTile(NamedTuple):
    """64 rows of queries or keys in shared memory: tiles, or their offsets in bytes."""

    left: Any  # [1, 64, 256]
    right: Any
    rope: Any  # [1, 64, 64]; where rows have no rope, some other tile


class Tiles(NamedTuple):
    """Tiles in shared memory.

    Each tile of two-byte numbers has a leading axis of 1. Consumers index it by ``zero``, a count shifted right by 30,
    which the compiler cannot know to be 0: else it would hoist the descriptors of all tiles out of the main loop and
    spill them.
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


class HalvesFull(NamedTuple):
    """mbarriers on which copies of a block's halves complete."""

    left: Any
    right: Any


class Full(NamedTuple):
    """mbarriers on which copies of the queries, and of blocks, complete."""

    q: Any
    k0: HalvesFull
    k1: HalvesFull


@gluon.jit
def half_of(block, SIDE: gl.constexpr):
    """The left or the right half of a ``LatentTile`` or of ``HalvesFull``."""
    if SIDE == LEFT:
        return block.left
    else:
        return block.right


@gluon.jit
def allocate_half(DTYPE: gl.constexpr):
    """Half of 64 rows, [1, 64, 256]."""
    return gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], SWIZZLED)


@gluon.jit
def allocate_square(DTYPE: gl.constexpr):
    """The rope of 64 rows, or P of a block, [1, 64, 64]."""
    return gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], SWIZZLED)


@gluon.jit
def allocate_vector(DTYPE: gl.constexpr):
    """A number for each row, [64]."""
    return gl.allocate_shared_memory(DTYPE, [ROWS], _VECTOR)


@gluon.jit
def allocate_tiles(q, k0, k1, p0, p1):
    """``Tiles`` of these, with the vectors that pass between the consumers."""
    return Tiles(
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
def allocate_full(
    Q_COUNT: gl.constexpr, HALF_COUNT: gl.constexpr, HALVES_COPIED: gl.constexpr = 2, BLOCKS: gl.constexpr = 2
):
    """``Full``, of so many arrivals for the queries and for a half of a block.

    A half of which nothing is copied has another one's: one of its own would be used by nobody (``allocate_mbarrier``).

    Args:
        HALVES_COPIED: both halves of a block, only something of the right one (1), or nothing (0).
        BLOCKS: that a step has.
    """
    q = allocate_mbarrier(Q_COUNT)
    k0 = _allocate_halves_full(q, HALF_COUNT, HALVES_COPIED)
    k1 = k0
    if BLOCKS == 2:
        k1 = _allocate_halves_full(q, HALF_COUNT, HALVES_COPIED)
    return Full(q, k0, k1)


@gluon.jit
def _allocate_halves_full(q, COUNT: gl.constexpr, HALVES_COPIED: gl.constexpr):
    right = q
    if HALVES_COPIED > 0:
        right = allocate_mbarrier(COUNT)
    left = right
    if HALVES_COPIED == 2:
        left = allocate_mbarrier(COUNT)
    return HalvesFull(left, right)
