"""The producer: one warp that schedules tiles and fills the consumers' stages by TMA.

It is a single warp, because several warps would synchronize before each copy.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.two_consumers import (
    BOTH_CONSUMER_THREADS,
    K_EMPTY,
    ONE_CONSUMER_THREADS,
    PRODUCER_THREADS,
    Q_EMPTY_FIRST,
    Q_EMPTY_SECOND,
    ROWS,
    V_EMPTY,
    end_tiles,
    stage_of,
    write_scalars,
)
from flashlatte.ops.dense_prefill.hopper.forward import schedule
from flashlatte.ops.dense_prefill.hopper.forward.tiles import DensePrefillTile
from flashlatte.runtime.gluon_compat import cta_barrier, tma_load
from flashlatte.runtime.kernel_records import Pointer

# Blocks of a tile that remain to be loaded when the next tile is fetched. Late, so that the program that finishes first
# gets the longest remaining tile; but early enough that the stages do not run empty.
_BLOCKS_BEFORE_NEXT_TILE = gl.constexpr(2)


class DensePrefillInputs(NamedTuple):
    """TMA descriptors of q, k and v [tokens, heads, d], and of the columns after the first tile if a row has two tiles
    in shared memory, else None.

    Columns after the end of a row are filled with zeros.
    """

    q: Pointer
    q_rest: Pointer
    k: Pointer
    k_rest: Pointer
    v: Pointer
    v_rest: Pointer


@gluon.jit
def _load(descriptor, rest, tiles, CHUNKS: gl.constexpr, first, stage, token, head, full):
    for chunk in gl.static_range(CHUNKS):
        tma_load(descriptor, [token, head, chunk * tiles[0].shape[2]], full, tiles[0].index(first + chunk))
    if len(tiles) == 2:
        tma_load(rest, [token, head, CHUNKS * tiles[0].shape[2]], full, tiles[1].index(stage))


@gluon.constexpr_function
def _copied_bytes(tiles, chunks):
    first, *rest = tiles
    return 2 * first.shape[1] * (chunks * first.shape[2] + sum(tile.shape[2] for tile in rest))


@gluon.jit
def _load_q(inputs, consumer, work_tile, ROW: gl.constexpr):
    CHUNKS: gl.constexpr = consumer.q[0].shape[0]
    write_scalars(consumer.work_tile, work_tile)
    cta_barrier()
    full = consumer.full.index(0)
    mbarrier.expect(full, _copied_bytes(consumer.q, CHUNKS))
    _load(inputs.q, inputs.q_rest, consumer.q, CHUNKS, 0, 0, work_tile.token + ROW, work_tile.head, full)


@gluon.jit
def _load_k(inputs, shared, step, token, head):
    CHUNKS: gl.constexpr = shared.first.q[0].shape[0]
    stage = stage_of(step)
    barriers.wait_at(K_EMPTY + stage, BOTH_CONSUMER_THREADS, PRODUCER_THREADS)
    full = shared.k_full.index(stage)
    mbarrier.expect(full, _copied_bytes(shared.k, CHUNKS))
    _load(inputs.k, inputs.k_rest, shared.k, CHUNKS, stage * CHUNKS, stage, token, head, full)


@gluon.jit
def _load_v(inputs, shared, step, token, head):
    stage = stage_of(step)
    barriers.wait_at(V_EMPTY + stage, BOTH_CONSUMER_THREADS, PRODUCER_THREADS)
    full = shared.v_full.index(stage)
    mbarrier.expect(full, _copied_bytes(shared.v, 1))
    _load(inputs.v, inputs.v_rest, shared.v, 1, stage, stage, token, head, full)


@gluon.jit
def _load_blocks(inputs, shared, step, token, head, count):
    """Load the ``count`` blocks before the one at ``token``, in descending order. Returns the next step and the last
    token."""
    for _ in range(opaque(count)):
        token -= shared.v[0].shape[1]
        _load_k(inputs, shared, step, token, head)
        _load_v(inputs, shared, step, token, head)
        step += 1
    return step, token


@gluon.jit
def produce(inputs, work, shared):
    KEYS: gl.constexpr = shared.v[0].shape[1]
    num_blocks = schedule.count_blocks(work)
    num_tiles = num_blocks * work.heads
    tile = gl.program_id(0)
    work_tile, first_key = schedule.find_tile(work, tile, num_blocks, KEYS)
    step = 0
    while tile < num_tiles:
        head = work_tile.head // work.group_kv
        token = first_key + work_tile.last * KEYS
        # The stage becomes empty before the queries, which the last product of the previous tile still reads.
        _load_k(inputs, shared, step, token, head)
        barriers.wait(Q_EMPTY_FIRST, ONE_CONSUMER_THREADS, PRODUCER_THREADS)
        _load_q(inputs, shared.first, work_tile, 0)
        barriers.wait(Q_EMPTY_SECOND, ONE_CONSUMER_THREADS, PRODUCER_THREADS)
        _load_q(inputs, shared.second, work_tile, ROWS)
        _load_v(inputs, shared, step, token, head)
        step += 1
        left = work_tile.blocks - 1
        step, token = _load_blocks(inputs, shared, step, token, head, gl.maximum(left - _BLOCKS_BEFORE_NEXT_TILE, 0))
        tile = schedule.fetch_next_tile(work)
        work_tile, first_key = schedule.find_tile(work, tile, num_blocks, KEYS)
        step, token = _load_blocks(inputs, shared, step, token, head, gl.minimum(left, _BLOCKS_BEFORE_NEXT_TILE))

    end_tiles(shared, step, DensePrefillTile(0, 0, 0, 0, 0, 0, 0))
