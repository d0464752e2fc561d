"""The producer: four warps that hand out tiles and keep the consumers' stages filled, by TMA."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import named_barriers
from flashlatte.ops.dense_prefill.hopper.forward import barriers, schedule
from flashlatte.ops.dense_prefill.hopper.forward.tiles import (
    CHUNK,
    KEYS,
    ROWS,
    STAGES,
    VALUES,
    Ticket,
    stage_of,
    write_ticket,
)
from flashlatte.runtime.gluon_compat import cta_barrier, tma_load


class Inputs(NamedTuple):
    """TMA descriptors of q, k and v [tokens, heads, d], for boxes of 64 x 64, 128 x 64 and 128 x 128."""

    q: Any
    k: Any
    v: Any


@gluon.jit
def _load_q(inputs, consumer, ticket, ROW: gl.constexpr, CHUNKS: gl.constexpr):
    write_ticket(consumer.ticket, ticket)
    cta_barrier()
    ready = consumer.ready.index(0)
    mbarrier.expect(ready, ROWS * CHUNKS * CHUNK * 2)
    for chunk in gl.static_range(CHUNKS):
        tma_load(inputs.q, [ticket.token + ROW, ticket.head, chunk * CHUNK], ready, consumer.q.index(chunk))


@gluon.jit
def _load_k(inputs, shared, step, token, head, CHUNKS: gl.constexpr):
    stage = stage_of(step)
    barriers.wait_stage(barriers.K_FREE, stage)
    ready = shared.k_ready.index(stage)
    mbarrier.expect(ready, KEYS * CHUNKS * CHUNK * 2)
    for chunk in gl.static_range(CHUNKS):
        tma_load(inputs.k, [token, head, chunk * CHUNK], ready, shared.k.index(stage * CHUNKS + chunk))


@gluon.jit
def _load_v(inputs, shared, step, token, head):
    stage = stage_of(step)
    barriers.wait_stage(barriers.V_FREE, stage)
    ready = shared.v_ready.index(stage)
    mbarrier.expect(ready, KEYS * VALUES * 2)
    tma_load(inputs.v, [token, head, 0], ready, shared.v.index(stage))


@gluon.jit
def _announce(consumer, ticket):
    write_ticket(consumer.ticket, ticket)
    cta_barrier()
    mbarrier.arrive(consumer.ready.index(0), count=1)


@gluon.jit
def produce(inputs, problem, shared, CHUNKS: gl.constexpr):
    num_blocks = schedule.count_blocks(problem)
    num_tiles = num_blocks * problem.heads
    tile = gl.program_id(0)
    step = 0
    while tile < num_tiles:
        ticket, first_key = schedule.find(problem, tile, num_blocks)
        head = ticket.head // problem.group_kv
        token = first_key + ticket.last * KEYS
        # The stage is free before the queries are: those serve until the last product of the tile before.
        _load_k(inputs, shared, step, token, head, CHUNKS)
        named_barriers.wait(barriers.Q_FREE_FIRST, barriers.PAIR)
        _load_q(inputs, shared.first, ticket, 0, CHUNKS)
        named_barriers.wait(barriers.Q_FREE_SECOND, barriers.PAIR)
        _load_q(inputs, shared.second, ticket, ROWS, CHUNKS)
        _load_v(inputs, shared, step, token, head)
        step += 1
        for _ in range(1, ticket.blocks):
            token -= KEYS
            _load_k(inputs, shared, step, token, head, CHUNKS)
            _load_v(inputs, shared, step, token, head)
            step += 1
        tile = schedule.take(problem)

    # The consumers run one product ahead: they get queries and a block of whatever lies there.
    nothing = Ticket(0, 0, 0, 0, 0, 0, 0)
    barriers.wait_stage(barriers.K_FREE, stage_of(step))
    mbarrier.arrive(shared.k_ready.index(stage_of(step)), count=1)
    named_barriers.wait(barriers.Q_FREE_FIRST, barriers.PAIR)
    _announce(shared.first, nothing)
    named_barriers.wait(barriers.Q_FREE_SECOND, barriers.PAIR)
    _announce(shared.second, nothing)
    # Their last arrivals.
    for stage in gl.static_range(STAGES):
        barriers.wait_stage(barriers.V_FREE, stage)
        barriers.wait_stage(barriers.K_FREE, stage_of(step + 1 + stage))
