"""The producer: a warp that hands out tiles and keeps the consumers' stages filled, by TMA, page after page.

One warp, as warps of a partition would meet before each copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.ptx.threads import lane, lanes_below_zero, of_lane_at
from flashlatte.kernels.hopper.two_consumers import (
    CHUNK,
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
    write_number,
    write_numbers,
)
from flashlatte.ops.paged_attention.hopper import schedule
from flashlatte.ops.paged_attention.hopper.tiles import (
    KEYS,
    SWIZZLED,
    Ticket,
)
from flashlatte.runtime.gluon_compat import cta_barrier, reinterpret, tma_load


class Inputs(NamedTuple):
    """What tiles are loaded from.

    Attributes:
        q: TMA descriptor of q [tokens, packs, pack, d], for boxes of 64 rows and 64 columns.
        k, v: of the caches [pages, page_size, h_kv, d], for boxes of ``box`` tokens and 64 columns.
        block_table, table_stride: pages of each request.
        num_pages: of the cache.
        boxes: copies that a block takes.
    """

    q: Any
    k: Any
    v: Any
    block_table: Any
    table_stride: Any
    num_pages: Any
    boxes: Any


class Seen(NamedTuple):
    """Of a request, the keys that a tile sees: from ``first`` up to, but not including, ``to``."""

    request: Any
    first: Any
    to: Any


@gluon.jit
def _look_up(inputs, seen, first_key, PLAN: gl.constexpr):
    """The pages of the block at ``first_key``: lane l has that of the block's keys 8 l to 8 l + 7, for l
    below 16. -1 for a page that is not in the cache, and where the tile sees no key of the box; and the same, but 0 for
    the latter."""
    key = first_key + lane() % 16 * 8 // PLAN.box * PLAN.box
    is_seen = (key < seen.to) & (key + PLAN.box > seen.first)
    entry = gl.load(
        inputs.block_table + seen.request.to(gl.int64) * inputs.table_stride + key // PLAN.page_size,
        mask=is_seen,
        other=-1,
    )
    page = gl.where((entry >= 0) & (entry < inputs.num_pages), entry, -1).to(gl.int32)
    return page, gl.where(is_seen, page, 0)


@gluon.jit
def _load_block(
    descriptor, boxes_of_block, ring, stage, full, page, first_key, head, CHUNKS: gl.constexpr, PLAN: gl.constexpr
):
    """Begin to load a block into a stage of a ring. Of a page -1 TMA writes zeros and reads nothing."""
    BOX: gl.constexpr = PLAN.box
    BOXES: gl.constexpr = KEYS // BOX
    COUNT: gl.constexpr = STAGES * CHUNKS * BOXES
    boxes = reinterpret(ring, ring.dtype, [COUNT, BOX, CHUNK], SWIZZLED)
    mbarrier.expect(full, KEYS * CHUNKS * CHUNK * 2)
    # A loop to the compiler, too, as it does not know the count: copies in a row want more registers than there are.
    for box in range(boxes_of_block):
        offset = (first_key + box * BOX) % PLAN.page_size
        box_page = of_lane_at(page, box * (BOX // 8))
        for chunk in gl.static_range(CHUNKS):
            to = boxes.index((stage * CHUNKS + chunk) * BOXES + box)
            tma_load(descriptor, [box_page, offset, head, chunk * CHUNK], full, to)


@gluon.jit
def _load_q(inputs, consumer, ticket, TOKEN: gl.constexpr, PLAN: gl.constexpr):
    CHUNKS: gl.constexpr = PLAN.chunks
    write_numbers(consumer.ticket, ticket)
    cta_barrier()
    full = consumer.full.index(0)
    mbarrier.expect(full, ROWS * CHUNKS * CHUNK * 2)
    for chunk in gl.static_range(CHUNKS):
        tma_load(inputs.q, [ticket.token + TOKEN, ticket.pack, 0, chunk * CHUNK], full, consumer.q.index(chunk))


@gluon.jit
def _load_k(inputs, shared, step, page, absent, first_key, head, PLAN: gl.constexpr):
    stage = stage_of(step)
    barriers.wait_at(K_EMPTY + stage, WITH_BOTH, PRODUCER)
    write_number(shared.absent, stage, lanes_below_zero(absent) & 0xFFFF)
    cta_barrier()
    _load_block(
        inputs.k, inputs.boxes, shared.k, stage, shared.k_full.index(stage), page, first_key, head, PLAN.chunks, PLAN
    )


@gluon.jit
def _load_v(inputs, shared, step, page, first_key, head, PLAN: gl.constexpr):
    stage = stage_of(step)
    barriers.wait_at(V_EMPTY + stage, WITH_BOTH, PRODUCER)
    _load_block(
        inputs.v, inputs.boxes, shared.v, stage, shared.v_full.index(stage), page, first_key, head, PLAN.v_chunks, PLAN
    )


@gluon.jit
def _announce(consumer, ticket):
    write_numbers(consumer.ticket, ticket)
    cta_barrier()
    mbarrier.arrive(consumer.full.index(0), count=1)


@gluon.jit
def produce(inputs, problem, shared, PLAN: gl.constexpr):
    num_blocks = schedule.count_blocks(problem, PLAN)
    num_tiles = num_blocks * problem.packs
    tile = gl.program_id(0)
    ticket, request = schedule.find(problem, tile, num_blocks, PLAN)
    step = 0
    while tile < num_tiles:
        seen = Seen(request, ticket.first_key, ticket.keys)
        head = ticket.pack // problem.packs_each
        first_key = ticket.last * KEYS
        page, absent = _look_up(inputs, seen, first_key, PLAN)
        # The stage is empty before the queries are: those serve until the last product of the tile before.
        _load_k(inputs, shared, step, page, absent, first_key, head, PLAN)
        barriers.wait(Q_EMPTY_FIRST, WITH_ONE, PRODUCER)
        _load_q(inputs, shared.first, ticket, 0, PLAN)
        barriers.wait(Q_EMPTY_SECOND, WITH_ONE, PRODUCER)
        _load_q(inputs, shared.second, ticket, ROWS // PLAN.pack, PLAN)
        following, following_absent = _look_up(inputs, seen, first_key - KEYS, PLAN)
        _load_v(inputs, shared, step, page, first_key, head, PLAN)
        step += 1
        blocks = opaque(ticket.blocks)
        # The next ticket, while this tile's first block is on its way.
        tile = schedule.take(problem)
        ticket, request = schedule.find(problem, tile, num_blocks, PLAN)
        for _ in range(1, blocks):
            first_key -= KEYS
            page = following
            absent = following_absent
            following, following_absent = _look_up(inputs, seen, first_key - KEYS, PLAN)
            _load_k(inputs, shared, step, page, absent, first_key, head, PLAN)
            _load_v(inputs, shared, step, page, first_key, head, PLAN)
            step += 1

    # The consumers run one product ahead: they get queries and a block of whatever lies there.
    nothing = Ticket(0, 0, 0, 0, 0, 0, 0, 0)
    barriers.wait_at(K_EMPTY + stage_of(step), WITH_BOTH, PRODUCER)
    mbarrier.arrive(shared.k_full.index(stage_of(step)), count=1)
    barriers.wait(Q_EMPTY_FIRST, WITH_ONE, PRODUCER)
    _announce(shared.first, nothing)
    barriers.wait(Q_EMPTY_SECOND, WITH_ONE, PRODUCER)
    _announce(shared.second, nothing)
    # Their last arrivals.
    for stage in gl.static_range(STAGES):
        barriers.wait_at(V_EMPTY + stage, WITH_BOTH, PRODUCER)
        barriers.wait_at(K_EMPTY + stage_of(step + 1 + stage), WITH_BOTH, PRODUCER)
