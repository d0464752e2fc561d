"""What the warps of a program share: tiles in shared memory, and the barriers that pass them on."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Heads of a program, and keys of a block: what one WGMMA takes.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)

# Layouts of the scores [64, 64] and of half an output [64, 256], and their rows and columns. With 16 warps a program
# starts with 128 registers a thread, and ptxas then refuses a WGMMA of 256 columns: it takes two of 128.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SCORE_COLS = gl.constexpr(gl.SliceLayout(0, SCORES))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUT))
WEIGHT_OPERAND = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# The same bytes, as words of two bf16.
SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# Named barriers. A half of a block of keys is free when its last reader is done with it, ready when it is filled.
K0_LEFT_FREE = gl.constexpr(5)
K0_RIGHT_FREE = gl.constexpr(6)
K1_RIGHT_FREE = gl.constexpr(7)
K1_LEFT_FREE = gl.constexpr(8)
K0_LEFT_READY = gl.constexpr(9)
K0_RIGHT_READY = gl.constexpr(10)
K1_RIGHT_READY = gl.constexpr(11)
K1_LEFT_READY = gl.constexpr(12)
# From the even consumer to the odd one: its weights and their reference are in shared memory. And back.
WEIGHTS0_READY = gl.constexpr(13)
REFERENCE1_READY = gl.constexpr(14)
WEIGHTS1_READY = gl.constexpr(15)

# Threads that meet at a barrier: those of both consumers; with the producer it is one consumer's, and the producer's.
TWO = gl.constexpr(256)
CONSUMER = gl.constexpr(128)

# Of a cache's tokens, by what they are made of.
PLAIN = gl.constexpr(0)
V32 = gl.constexpr(1)
MODEL1 = gl.constexpr(2)


def producer_warps(cache_format: int) -> int:
    """Warps of the producer. The fewer there are, the more registers has each of them for rows under way."""
    return 8 if cache_format == PLAIN.value else 4


class Tiles(NamedTuple):
    """Left and right are columns 0 to 255 and 256 to 511 of a row, rope columns 512 to 575 (some other tile where
    rows have none).

    Each tile has a leading axis of 1, to be indexed by a zero that the compiler cannot see through: it would hoist
    the descriptors of all tiles out of the main loop and spill them.
    """

    q_left: Any  # [1, 64, 256]
    q_right: Any
    q_rope: Any  # [1, 64, 64]
    k0_left: Any  # [1, 64, 256]
    k0_right: Any
    k0_rope: Any  # [1, 64, 64]
    k1_left: Any
    k1_right: Any
    k1_rope: Any
    weights0: Any  # [1, 64, 64]
    weights1: Any
    mask0: Any  # int32 [64], 0 where an index selects nothing
    mask1: Any
    reference0: Any  # float32 [64], what weights0 and weights1 are relative to
    reference1: Any
    sums0: Any  # float32 [64], row sums of the even and of the odd consumer
    sums1: Any


class Ready(NamedTuple):
    """mbarriers of what comes by cp.async.

    Attributes:
        query: q is there.
        k0_left, k0_right, k1_left, k1_right: so is a half of a block of a cache without scales, or the rope of a
            block of a cache with scales (right).
    """

    query: Any
    k0_left: Any
    k0_right: Any
    k1_left: Any
    k1_right: Any


@gluon.jit
def _vector(DTYPE: gl.constexpr):
    return gl.allocate_shared_memory(DTYPE, [ROWS], _VECTOR)


@gluon.jit
def allocate(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr):
    # In the order of their addresses, from the first one on, as Triton places the largest first. ``exchange`` knows.
    k0_left = gl.allocate_shared_memory(DTYPE, [1, KEYS, HALF], SWIZZLED)
    k0_right = gl.allocate_shared_memory(DTYPE, [1, KEYS, HALF], SWIZZLED)
    k1_left = gl.allocate_shared_memory(DTYPE, [1, KEYS, HALF], SWIZZLED)
    k1_right = gl.allocate_shared_memory(DTYPE, [1, KEYS, HALF], SWIZZLED)
    q_left = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], SWIZZLED)
    q_right = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], SWIZZLED)
    weights0 = gl.allocate_shared_memory(DTYPE, [1, ROWS, KEYS], SWIZZLED)
    weights1 = gl.allocate_shared_memory(DTYPE, [1, ROWS, KEYS], SWIZZLED)
    q_rope = weights1
    k0_rope = weights0
    k1_rope = weights1
    if HAS_ROPE:
        # Block 0's weights exist only between the last read of its rope and the next block's, and lie there.
        q_rope = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], SWIZZLED)
        k1_rope = gl.allocate_shared_memory(DTYPE, [1, KEYS, ROPE], SWIZZLED)
    return Tiles(
        q_left,
        q_right,
        q_rope,
        k0_left,
        k0_right,
        k0_rope,
        k1_left,
        k1_right,
        k1_rope,
        weights0,
        weights1,
        _vector(gl.int32),
        _vector(gl.int32),
        _vector(gl.float32),
        _vector(gl.float32),
        _vector(gl.float32),
        _vector(gl.float32),
    )


@gluon.jit
def _mbarrier(COUNT: gl.constexpr):
    # Each its own allocation: barriers that share one draw more block-wide barriers from the compiler.
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit
def allocate_ready(THREADS: gl.constexpr):
    return Ready(_mbarrier(CONSUMER), _mbarrier(THREADS), _mbarrier(THREADS), _mbarrier(THREADS), _mbarrier(THREADS))
