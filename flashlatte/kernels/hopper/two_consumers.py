"""Shared parts of the prefill kernels with two consumers: 64 query rows each, and the same blocks of keys and values.

This module has the barriers, the stages, the window mask and the online softmax. A kernel supplies its tiles, its
producer and its schedule.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.barriers import FIRST_FREE
from flashlatte.kernels.hopper.ptx.registers import mask_columns, opaque
from flashlatte.kernels.hopper.softmax import HEADROOM, NO_SCORE
from flashlatte.runtime.gluon_compat import cta_barrier

# Query rows of a consumer, and of a program's tile (two consumers).
ROWS = gl.constexpr(64)
TILE = gl.constexpr(128)
# Columns of a copy, and of a product of q and k: 128 bytes, the width of the swizzle.
CHUNK = gl.constexpr(64)
# Blocks in the rings of keys and of values; a power of two.
STAGES = gl.constexpr(2)

# Four warps over a tile [n, 64], 16 bytes per thread.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Layouts of a scalar in shared memory, and of a scalar replicated in all threads of a consumer or of the producer.
SCALAR_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_REPLICATED_IN_CONSUMER = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_REPLICATED_IN_PRODUCER = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))

# Threads of the producer, and of barriers of the producer with one consumer or with both.
PRODUCER_THREADS = gl.constexpr(32)
ONE_CONSUMER_THREADS = gl.constexpr(160)
BOTH_CONSUMER_THREADS = gl.constexpr(288)
# Registers per thread. Three warpgroups share 512 per lane; the producer's single warp counts as a warpgroup.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

# Named barriers. The queries of a consumer are empty (that consumer to the producer).
Q_EMPTY_FIRST = gl.constexpr(FIRST_FREE)
Q_EMPTY_SECOND = gl.constexpr(FIRST_FREE + 1)
# Ping-pong scheduling: a consumer may issue its products (signalled by the other consumer).
PINGPONG_FIRST = gl.constexpr(FIRST_FREE + 2)
PINGPONG_SECOND = gl.constexpr(FIRST_FREE + 3)
# A stage is empty (both consumers to the producer); one barrier per stage.
K_EMPTY = gl.constexpr(FIRST_FREE + 4)
V_EMPTY = gl.constexpr(FIRST_FREE + 6)


class PrefillConsumer(NamedTuple):
    """State of one consumer: its queries, its work tile, and the full barrier of both."""

    q: Any
    work_tile: Any  # int32 [scalars, 1]
    full: Any


class PrefillArgs(NamedTuple):
    """Arguments of a consumer that are the same for all tiles. ``scale_log2`` is softmax_scale · log2(e)."""

    shared: Any
    window: Any
    scale_log2: Any
    results: Any


class PrefillMask(NamedTuple):
    """The visible keys of a consumer's rows.

    Attributes:
        unmasked_from, unmasked_to: the range of keys that is visible to all rows.
        position: position of the first row.
        keys: number of keys of the request.
    """

    unmasked_from: Any
    unmasked_to: Any
    position: Any
    keys: Any
    window: Any


class RowStatistics(NamedTuple):
    """Statistics of the rows, [64]: the unscaled score that P is relative to, and the sum of P."""

    row_max: Any
    row_sum: Any


@gluon.jit
def stage_of(step):
    """Stage of block number ``step``, counted over all tiles."""
    return step & (STAGES - 1)


@gluon.jit
def phase_of(step):
    """Phase of the mbarrier of block ``step``'s stage."""
    return (step // STAGES) & 1


@gluon.jit
def wait_k(shared, step):
    mbarrier.wait(shared.k_full.index(stage_of(step)), phase_of(step))


@gluon.jit
def wait_v(shared, step):
    mbarrier.wait(shared.v_full.index(stage_of(step)), phase_of(step))


@gluon.jit
def signal_empty(Q_EMPTY: gl.constexpr):
    """At the start of a consumer: its queries and all stages are empty."""
    barriers.arrive(Q_EMPTY, ONE_CONSUMER_THREADS)
    for stage in gl.static_range(STAGES):
        barriers.arrive_at(K_EMPTY + stage, BOTH_CONSUMER_THREADS)
        barriers.arrive_at(V_EMPTY + stage, BOTH_CONSUMER_THREADS)


@gluon.jit
def end_tiles(shared, step, nothing):
    """At the end of the producer, whose next block is ``step``: publish a work tile without blocks.

    The consumers compute one block of scores ahead: signal queries and a block of arbitrary contents.
    """
    barriers.wait_at(K_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS, PRODUCER_THREADS)
    mbarrier.arrive(shared.k_full.index(stage_of(step)), count=1)
    barriers.wait(Q_EMPTY_FIRST, ONE_CONSUMER_THREADS, PRODUCER_THREADS)
    _publish(shared.first, nothing)
    barriers.wait(Q_EMPTY_SECOND, ONE_CONSUMER_THREADS, PRODUCER_THREADS)
    _publish(shared.second, nothing)
    # Wait for the consumers' last arrivals.
    for stage in gl.static_range(STAGES):
        barriers.wait_at(V_EMPTY + stage, BOTH_CONSUMER_THREADS, PRODUCER_THREADS)
        barriers.wait_at(K_EMPTY + stage_of(step + 1 + stage), BOTH_CONSUMER_THREADS, PRODUCER_THREADS)


@gluon.jit
def _publish(consumer, work_tile):
    write_scalars(consumer.work_tile, work_tile)
    cta_barrier()
    mbarrier.arrive(consumer.full.index(0), count=1)


@gluon.jit
def write_scalar(smem, index, value):
    """Write a scalar from the producer into ``smem`` [n, 1]."""
    smem.index(index).store(gl.full([1], 0, gl.int32, _REPLICATED_IN_PRODUCER) + value)


@gluon.jit
def write_scalars(smem, values):
    """Write a tuple of scalars."""
    for index in gl.static_range(len(values)):
        write_scalar(smem, index, values[index])


@gluon.jit
def read_scalar(smem, index):
    """Read a scalar. It is opaque, because the compiler would move the load after the barrier that allows overwriting
    it."""
    return opaque(gl.max(smem.index(index).load(_REPLICATED_IN_CONSUMER), 0))


@gluon.jit
def read_scalars(smem):
    """Read all scalars of ``smem`` [n, 1], as a tuple."""
    COUNT: gl.constexpr = smem.shape[0]
    values = ()
    for index in gl.static_range(COUNT):
        values += (read_scalar(smem, index),)
    return values


@gluon.jit
def make_mask(work_tile, window, FIRST_ROW: gl.constexpr, PACK: gl.constexpr):
    """The mask of a consumer's rows, from FIRST_ROW of the tile on; PACK consecutive rows have the same position."""
    position = work_tile.position + FIRST_ROW // PACK
    unmasked_from = position + (ROWS - 1) // PACK - window.left
    unmasked_to = gl.minimum(position + window.right + 1, work_tile.keys)
    return PrefillMask(unmasked_from, unmasked_to, position, work_tile.keys, window)


@gluon.jit
def apply_mask(scores, mask, first_key, PACK: gl.constexpr):
    """Scores [64, keys] of the block at ``first_key``, with -inf for masked keys."""
    LAYOUT: gl.constexpr = scores.type.layout
    KEYS: gl.constexpr = scores.shape[1]
    if (first_key < mask.unmasked_from) | (first_key + KEYS > mask.unmasked_to):
        position = mask.position - first_key + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) // PACK
        visible_from = position - mask.window.left
        visible_to = gl.minimum(position + mask.window.right + 1, mask.keys - first_key)
        key = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))[None, :]
        scores = mask_columns(scores, visible_from[:, None] - key, visible_to[:, None] - key)
    return scores


@gluon.jit
def empty_state(LAYOUT: gl.constexpr):
    """The initial statistics; ``LAYOUT`` is the layout of the scores."""
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    return RowStatistics(gl.full([ROWS], NO_SCORE, gl.float32, ROW_LAYOUT), gl.zeros([ROWS], gl.float32, ROW_LAYOUT))


@gluon.jit
def attend(state, scores, scale_log2):
    """One step of the online softmax: P of a block [64, keys], the new statistics, and alpha [64], the factor for the
    previous output."""
    block_max = gl.max(scores, 1)
    row_max = gl.where((block_max - state.row_max) * scale_log2 > HEADROOM, block_max, state.row_max)
    p = gl.exp2(scores * scale_log2 - (row_max * scale_log2)[:, None])
    alpha = gl.exp2((state.row_max - row_max) * scale_log2)
    return p, RowStatistics(row_max, state.row_sum * alpha + gl.sum(p, 1)), alpha
