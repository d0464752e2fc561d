"""What prefill kernels share whose two consumers, of 64 query rows each, take the same blocks of keys and values.

Their barriers and stages, which keys a row sees by its window, and the statistics of rows. A kernel brings its tiles,
its producer and its list of work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper.barriers import FIRST_FREE
from flashlatte.kernels.hopper.ptx.registers import mask_columns, opaque
from flashlatte.kernels.hopper.softmax import HEADROOM, NO_SCORE

# Query rows of a consumer, and of a program's tile (two consumers).
ROWS = gl.constexpr(64)
TILE = gl.constexpr(128)
# Columns that a copy takes, and a product of q and k: 128 bytes, the width of a swizzled line.
CHUNK = gl.constexpr(64)
# Blocks that the rings of keys and of values hold; a power of two.
STAGES = gl.constexpr(2)

# Threads of four warps over a tile [n, 64], 16 bytes each.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Layouts of single numbers in shared memory, and of the threads of a consumer, or of the producer, that all hold one.
NUMBER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_SAME_IN_ALL = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_SAME_IN_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))

# Threads of the producer, and of those that meet at barriers: it and one consumer, it and both.
PRODUCER = gl.constexpr(32)
WITH_ONE = gl.constexpr(160)
WITH_BOTH = gl.constexpr(288)
# Registers of a thread, of the 512 that one of three warpgroups has in all: the producer's one warp counts as four.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

# Named barriers. A consumer's queries may be replaced (that consumer to the producer).
Q_EMPTY_FIRST = gl.constexpr(FIRST_FREE)
Q_EMPTY_SECOND = gl.constexpr(FIRST_FREE + 1)
# A consumer may start its multiplications (the other one to it).
TURN_FIRST = gl.constexpr(FIRST_FREE + 2)
TURN_SECOND = gl.constexpr(FIRST_FREE + 3)
# A stage may be refilled (both consumers to the producer); a barrier for each stage.
K_EMPTY = gl.constexpr(FIRST_FREE + 4)
V_EMPTY = gl.constexpr(FIRST_FREE + 6)


class Window(NamedTuple):
    """Keys before and behind its own position that a query sees."""

    left: Any
    right: Any


class Call(NamedTuple):
    """What stays the same over all tiles. ``scale_log2`` is softmax_scale · log2(e)."""

    shared: Any
    window: Any
    scale_log2: Any
    results: Any


class Mask(NamedTuple):
    """Which keys the rows of a consumer see.

    Attributes:
        seen_by_all_from, seen_by_all_to: the keys that all rows see.
        position: of the first row.
        keys: of the request.
        left, right: the window.
    """

    seen_by_all_from: Any
    seen_by_all_to: Any
    position: Any
    keys: Any
    left: Any
    right: Any


class State(NamedTuple):
    """Statistics of the rows, [64]: the raw score whose P is 1, and the sum of P."""

    row_max: Any
    row_sum: Any


@gluon.jit
def stage_of(step):
    """Stage of the block that is taken as number ``step``, over all tiles."""
    return step & (STAGES - 1)


@gluon.jit
def phase_of(step):
    """Phase of its stage's mbarrier."""
    return (step // STAGES) & 1


@gluon.jit
def mbarriers(COUNT: gl.constexpr):
    """[COUNT, 1], each for one arrival."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=1)
    return barriers


@gluon.jit
def wait_k(shared, step):
    mbarrier.wait(shared.k_full.index(stage_of(step)), phase_of(step))


@gluon.jit
def wait_v(shared, step):
    mbarrier.wait(shared.v_full.index(stage_of(step)), phase_of(step))


@gluon.jit
def write_number(box, index, number):
    """The producer's, into box [n, 1]."""
    box.index(index).store(gl.full([1], 0, gl.int32, _SAME_IN_WARP) + number)


@gluon.jit
def write_numbers(box, numbers):
    """``write_number`` of a tuple."""
    for index in gl.static_range(len(numbers)):
        write_number(box, index, numbers[index])


@gluon.jit
def read_number(box, index):
    """What stands there now: left alone, the compiler reads it behind the barrier that lets it be overwritten."""
    return opaque(gl.max(box.index(index).load(_SAME_IN_ALL), 0))


@gluon.jit
def mask_of(ticket, window, FIRST_ROW: gl.constexpr, PACK: gl.constexpr):
    """The mask of a consumer's rows, from FIRST_ROW of the ticket's tile on; PACK rows have one position."""
    position = ticket.position + FIRST_ROW // PACK
    seen_by_all_from = position + (ROWS - 1) // PACK - window.left
    seen_by_all_to = gl.minimum(position + window.right + 1, ticket.keys)
    return Mask(seen_by_all_from, seen_by_all_to, position, ticket.keys, window.left, window.right)


@gluon.jit
def apply_mask(scores, mask, first_key, PACK: gl.constexpr):
    """Scores [64, keys] of the block at ``first_key``, -inf where a row does not see the key."""
    LAYOUT: gl.constexpr = scores.type.layout
    KEYS: gl.constexpr = scores.shape[1]
    if (first_key < mask.seen_by_all_from) | (first_key + KEYS > mask.seen_by_all_to):
        position = mask.position - first_key + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) // PACK
        seen_from = position - mask.left
        seen_to = gl.minimum(position + mask.right + 1, mask.keys - first_key)
        key = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))[None, :]
        scores = mask_columns(scores, seen_from[:, None] - key, seen_to[:, None] - key)
    return scores


@gluon.jit
def empty_state(LAYOUT: gl.constexpr):
    """Of rows that have seen no key; ``LAYOUT`` is that of scores."""
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    return State(gl.full([ROWS], NO_SCORE, gl.float32, ROW_LAYOUT), gl.zeros([ROWS], gl.float32, ROW_LAYOUT))


@gluon.jit
def attend(state, scores, scale_log2):
    """P of a block [64, keys], the statistics with it, and alpha [64], by which what was summed before is rescaled."""
    block_max = gl.max(scores, 1)
    row_max = gl.where((block_max - state.row_max) * scale_log2 > HEADROOM, block_max, state.row_max)
    p = gl.exp2(scores * scale_log2 - (row_max * scale_log2)[:, None])
    alpha = gl.exp2((state.row_max - row_max) * scale_log2)
    return p, State(row_max, state.row_sum * alpha + gl.sum(p, 1)), alpha
