"""The producer: four warps that hand out tiles and keep the consumers' stages filled, by TMA."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.ops.dense_prefill.hopper.forward import schedule
from flashlatte.ops.dense_prefill.hopper.forward.tiles import (
    CHUNK,
    K_EMPTY,
    Q_EMPTY_FIRST,
    Q_EMPTY_SECOND,
    ROWS,
    STAGES,
    V_EMPTY,
    Ticket,
    stage_of,
    write_ticket,
)
from flashlatte.runtime.gluon_compat import cta_barrier, tma_load


class Inputs(NamedTuple):
    """TMA descriptors of q, k and v [tokens, heads, d], for boxes of 64 x 64, keys x 64 and keys x d_v.

    Columns that a row does not have arrive as zeros.
    """

    q: Any
    k: Any
    v: Any


@gluon.jit
def _load_q(inputs, consumer, ticket, ROW: gl.constexpr):
    CHUNKS: gl.constexpr = consumer.q.shape[0]
    write_ticket(consumer.ticket, ticket)
    cta_barrier()
    full = consumer.full.index(0)
    mbarrier.expect(full, ROWS * CHUNKS * CHUNK * 2)
    for chunk in gl.static_range(CHUNKS):
        tma_load(inputs.q, [ticket.token + ROW, ticket.head, chunk * CHUNK], full, consumer.q.index(chunk))


@gluon.jit
def _load_k(inputs, shared, step, token, head):
    KEYS: gl.constexpr = shared.v.shape[1]
    CHUNKS: gl.constexpr = shared.first.q.shape[0]
    stage = stage_of(step)
    barriers.wait_at(K_EMPTY + stage, barriers.ALL)
    full = shared.k_full.index(stage)
    mbarrier.expect(full, KEYS * CHUNKS * CHUNK * 2)
    for chunk in gl.static_range(CHUNKS):
        tma_load(inputs.k, [token, head, chunk * CHUNK], full, shared.k.index(stage * CHUNKS + chunk))


@gluon.jit
def _load_v(inputs, shared, step, token, head):
    stage = stage_of(step)
    barriers.wait_at(V_EMPTY + stage, barriers.ALL)
    full = shared.v_full.index(stage)
    mbarrier.expect(full, shared.v.shape[1] * shared.v.shape[2] * 2)
    tma_load(inputs.v, [token, head, 0], full, shared.v.index(stage))


@gluon.jit
def _announce(consumer, ticket):
    write_ticket(consumer.ticket, ticket)
    cta_barrier()
    mbarrier.arrive(consumer.full.index(0), count=1)


@gluon.jit
def produce(inputs, problem, shared):
    KEYS: gl.constexpr = shared.v.shape[1]
    num_blocks = schedule.count_blocks(problem)
    num_tiles = num_blocks * problem.heads
    tile = gl.program_id(0)
    step = 0
    while tile < num_tiles:
        ticket, first_key = schedule.find(problem, tile, num_blocks, KEYS)
        head = ticket.head // problem.group_kv
        token = first_key + ticket.last * KEYS
        # The stage is empty before the queries are: those serve until the last product of the tile before.
        _load_k(inputs, shared, step, token, head)
        barriers.wait(Q_EMPTY_FIRST, barriers.PAIR)
        _load_q(inputs, shared.first, ticket, 0)
        barriers.wait(Q_EMPTY_SECOND, barriers.PAIR)
        _load_q(inputs, shared.second, ticket, ROWS)
        _load_v(inputs, shared, step, token, head)
        step += 1
        for _ in range(1, ticket.blocks):
            token -= KEYS
            _load_k(inputs, shared, step, token, head)
            _load_v(inputs, shared, step, token, head)
            step += 1
        tile = schedule.take(problem)

    # The consumers run one product ahead: they get queries and a block of whatever lies there.
    nothing = Ticket(0, 0, 0, 0, 0, 0, 0)
    barriers.wait_at(K_EMPTY + stage_of(step), barriers.ALL)
    mbarrier.arrive(shared.k_full.index(stage_of(step)), count=1)
    barriers.wait(Q_EMPTY_FIRST, barriers.PAIR)
    _announce(shared.first, nothing)
    barriers.wait(Q_EMPTY_SECOND, barriers.PAIR)
    _announce(shared.second, nothing)
    # Their last arrivals.
    for stage in gl.static_range(STAGES):
        barriers.wait_at(V_EMPTY + stage, barriers.ALL)
        barriers.wait_at(K_EMPTY + stage_of(step + 1 + stage), barriers.ALL)
