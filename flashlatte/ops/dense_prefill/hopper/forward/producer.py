"""The producer: a warp that hands out tiles and keeps the consumers' stages filled, by TMA.

One warp, as warps of a partition would meet before each copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.two_consumers import (
    K_EMPTY,
    PRODUCER,
    Q_EMPTY_FIRST,
    Q_EMPTY_SECOND,
    ROWS,
    STAGES,
    V_EMPTY,
    WITH_BOTH,
    WITH_ONE,
    stage_of,
    write_numbers,
)
from flashlatte.ops.dense_prefill.hopper.forward import schedule
from flashlatte.ops.dense_prefill.hopper.forward.tiles import Ticket
from flashlatte.runtime.gluon_compat import cta_barrier, tma_load

# Blocks of a tile that are still to be loaded when the next tile is taken. Late, so that who is done first takes the
# longest tile that is left; not so late that the stages run empty meanwhile.
_BLOCKS_AHEAD = gl.constexpr(2)


class Inputs(NamedTuple):
    """TMA descriptors of q, k and v [tokens, heads, d], for the tiles of each in shared memory: tuples of one or two.

    Columns that a row does not have arrive as zeros.
    """

    q: Any
    k: Any
    v: Any


@gluon.jit
def both(first, rest):
    if rest is None:
        return (first,)
    else:
        return first, rest


@gluon.jit
def _load(descriptors, tiles, CHUNKS: gl.constexpr, first, stage, token, head, full):
    for chunk in gl.static_range(CHUNKS):
        tma_load(descriptors[0], [token, head, chunk * tiles[0].shape[2]], full, tiles[0].index(first + chunk))
    if len(tiles) == 2:
        tma_load(descriptors[1], [token, head, CHUNKS * tiles[0].shape[2]], full, tiles[1].index(stage))


@gluon.constexpr_function
def _copied_bytes(tiles, chunks):
    first, *rest = tiles
    return 2 * first.shape[1] * (chunks * first.shape[2] + sum(tile.shape[2] for tile in rest))


@gluon.jit
def _load_q(inputs, consumer, ticket, ROW: gl.constexpr):
    CHUNKS: gl.constexpr = consumer.q[0].shape[0]
    write_numbers(consumer.ticket, ticket)
    cta_barrier()
    full = consumer.full.index(0)
    mbarrier.expect(full, _copied_bytes(consumer.q, CHUNKS))
    _load(inputs.q, consumer.q, CHUNKS, 0, 0, ticket.token + ROW, ticket.head, full)


@gluon.jit
def _load_k(inputs, shared, step, token, head):
    CHUNKS: gl.constexpr = shared.first.q[0].shape[0]
    stage = stage_of(step)
    barriers.wait_at(K_EMPTY + stage, WITH_BOTH, PRODUCER)
    full = shared.k_full.index(stage)
    mbarrier.expect(full, _copied_bytes(shared.k, CHUNKS))
    _load(inputs.k, shared.k, CHUNKS, stage * CHUNKS, stage, token, head, full)


@gluon.jit
def _load_v(inputs, shared, step, token, head):
    stage = stage_of(step)
    barriers.wait_at(V_EMPTY + stage, WITH_BOTH, PRODUCER)
    full = shared.v_full.index(stage)
    mbarrier.expect(full, _copied_bytes(shared.v, 1))
    _load(inputs.v, shared.v, 1, stage, stage, token, head, full)


@gluon.jit
def _load_blocks(inputs, shared, step, token, head, count):
    """The ``count`` blocks before the one at ``token``, the nearest first; the step that follows and the last token."""
    for _ in range(opaque(count)):
        token -= shared.v[0].shape[1]
        _load_k(inputs, shared, step, token, head)
        _load_v(inputs, shared, step, token, head)
        step += 1
    return step, token


@gluon.jit
def _announce(consumer, ticket):
    write_numbers(consumer.ticket, ticket)
    cta_barrier()
    mbarrier.arrive(consumer.full.index(0), count=1)


@gluon.jit
def produce(inputs, problem, shared):
    KEYS: gl.constexpr = shared.v[0].shape[1]
    num_blocks = schedule.count_blocks(problem)
    num_tiles = num_blocks * problem.heads
    tile = gl.program_id(0)
    ticket, first_key = schedule.find(problem, tile, num_blocks, KEYS)
    step = 0
    while tile < num_tiles:
        head = ticket.head // problem.group_kv
        token = first_key + ticket.last * KEYS
        # The stage is empty before the queries are: those serve until the last product of the tile before.
        _load_k(inputs, shared, step, token, head)
        barriers.wait(Q_EMPTY_FIRST, WITH_ONE, PRODUCER)
        _load_q(inputs, shared.first, ticket, 0)
        barriers.wait(Q_EMPTY_SECOND, WITH_ONE, PRODUCER)
        _load_q(inputs, shared.second, ticket, ROWS)
        _load_v(inputs, shared, step, token, head)
        step += 1
        left = ticket.blocks - 1
        step, token = _load_blocks(inputs, shared, step, token, head, gl.maximum(left - _BLOCKS_AHEAD, 0))
        tile = schedule.take(problem)
        ticket, first_key = schedule.find(problem, tile, num_blocks, KEYS)
        step, token = _load_blocks(inputs, shared, step, token, head, gl.minimum(left, _BLOCKS_AHEAD))

    # The consumers run one product ahead: they get queries and a block of whatever lies there.
    nothing = Ticket(0, 0, 0, 0, 0, 0, 0)
    barriers.wait_at(K_EMPTY + stage_of(step), WITH_BOTH, PRODUCER)
    mbarrier.arrive(shared.k_full.index(stage_of(step)), count=1)
    barriers.wait(Q_EMPTY_FIRST, WITH_ONE, PRODUCER)
    _announce(shared.first, nothing)
    barriers.wait(Q_EMPTY_SECOND, WITH_ONE, PRODUCER)
    _announce(shared.second, nothing)
    # The consumers' last arrivals.
    for stage in gl.static_range(STAGES):
        barriers.wait_at(V_EMPTY + stage, WITH_BOTH, PRODUCER)
        barriers.wait_at(K_EMPTY + stage_of(step + 1 + stage), WITH_BOTH, PRODUCER)
