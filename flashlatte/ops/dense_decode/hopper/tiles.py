"""What the warps of a program share: tiles in shared memory, and the barriers that pass them on."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Query rows of a program, and keys of a block: what one WGMMA takes.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
# A step of the main loop takes two blocks: block 0 is scored by the even consumer, block 1 by the odd one.
PAIR = gl.constexpr(128)
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)

# Layouts of the scores [64, 64] and of half an output [64, 256], and their rows and columns.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SCORE_COLS = gl.constexpr(gl.SliceLayout(0, SCORES))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUT))
OUTPUT_COLS = gl.constexpr(gl.SliceLayout(0, OUTPUT))
ROPE_OPERAND = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
WEIGHT_OPERAND = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))
# Threads of four warps over a tile [64, n], 16 bytes each.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# Named barriers. A tile is free when its last reader is done with it; the producer waits for that.
QUERY_FREE = gl.constexpr(5)
K0_LEFT_FREE = gl.constexpr(6)
K0_RIGHT_FREE = gl.constexpr(7)
K1_RIGHT_FREE = gl.constexpr(8)
K1_LEFT_FREE = gl.constexpr(9)
# From the even consumer to the odd one: its weights and their reference are in shared memory. And back.
WEIGHTS0_READY = gl.constexpr(10)
REFERENCE1_READY = gl.constexpr(11)
WEIGHTS1_READY = gl.constexpr(12)
SUMS_READY = gl.constexpr(13)
# From the odd consumer to the even one: weights may lie where the query's rope was.
ROPE_TAKEN = gl.constexpr(14)

# Threads that meet at a barrier: two partitions, or all three.
TWO = gl.constexpr(256)
THREE = gl.constexpr(384)


class Tiles(NamedTuple):
    """Left and right are columns 0 to 255 and 256 to 511 of a row, rope columns 512 to 575 (some other
    tile where rows have none).

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
    reference0: Any  # float32 [64], what weights0 and weights1 are relative to
    reference1: Any
    sums0: Any  # float32 [64], row sums of the even and of the odd consumer
    sums1: Any


class Ready(NamedTuple):
    """mbarriers on which the producer's copies complete, once an item (query) or once a step."""

    query: Any
    k0_left: Any
    k0_right: Any
    k1_left: Any
    k1_right: Any


@gluon.jit
def allocate(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr):
    q_left = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], _SWIZZLED)
    q_right = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], _SWIZZLED)
    k0_left = gl.allocate_shared_memory(DTYPE, [1, KEYS, HALF], _SWIZZLED)
    k0_right = gl.allocate_shared_memory(DTYPE, [1, KEYS, HALF], _SWIZZLED)
    k1_left = gl.allocate_shared_memory(DTYPE, [1, KEYS, HALF], _SWIZZLED)
    k1_right = gl.allocate_shared_memory(DTYPE, [1, KEYS, HALF], _SWIZZLED)
    weights0 = gl.allocate_shared_memory(DTYPE, [1, ROWS, KEYS], _SWIZZLED)
    weights1 = gl.allocate_shared_memory(DTYPE, [1, ROWS, KEYS], _SWIZZLED)
    # The consumers take the query's rope into registers when an item begins, so weights can lie on it.
    q_rope = weights0
    k0_rope = weights0
    k1_rope = weights0
    if HAS_ROPE:
        k0_rope = gl.allocate_shared_memory(DTYPE, [1, KEYS, ROPE], _SWIZZLED)
        k1_rope = gl.allocate_shared_memory(DTYPE, [1, KEYS, ROPE], _SWIZZLED)
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
        gl.allocate_shared_memory(gl.float32, [ROWS], _VECTOR),
        gl.allocate_shared_memory(gl.float32, [ROWS], _VECTOR),
        gl.allocate_shared_memory(gl.float32, [ROWS], _VECTOR),
        gl.allocate_shared_memory(gl.float32, [ROWS], _VECTOR),
    )


@gluon.jit
def _mbarrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def allocate_ready():
    # Each its own allocation: barriers that share one draw more block-wide barriers from the compiler.
    return Ready(_mbarrier(), _mbarrier(), _mbarrier(), _mbarrier(), _mbarrier())
