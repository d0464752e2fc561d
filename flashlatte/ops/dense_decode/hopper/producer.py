"""The producer: four warps that keep the tiles filled, by TMA; queries by cp.async where TMA cannot copy them."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_pipeline import finish_producing
from flashlatte.kernels.hopper.mla_tiles import (
    COPY,
    HALF,
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    KEYS,
    LATENT,
    ROPE,
    ROWS,
)
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.ptx.threads import of_lane
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.tiles import Q_EMPTY
from flashlatte.runtime.gluon_compat import cp_async, tma_load
from flashlatte.split_kv import device


class Query(NamedTuple):
    """The queries, their strides in units of 8 numbers (16 bytes); ``heads`` rows a token, ``rows`` a kv head.

    ``query_half`` and ``query_rope`` are descriptors of q, of boxes of tokens and heads that make 64 rows; None where
    none do.
    """

    query_half: Any
    query_rope: Any
    q: Any
    q_stride_request: Any
    q_stride_token: Any
    q_stride_head: Any
    heads: Any
    rows: Any


class Corner(NamedTuple):
    """Token and head of the first of a program's 64 rows."""

    token: Any
    head: Any


@gluon.jit
def find_corner(query, group):
    """Opaque, so that it is worked out here, before lengths have come, and not where queries are asked for."""
    token = group.first_row // query.heads
    head = group.kv_head * query.heads + group.first_row - token * query.heads
    return Corner(opaque(token), opaque(head))


@gluon.jit
def load_queries(call, request, PLAN: gl.constexpr):
    """Begin to load the queries of a request, without their rope."""
    query, corner, q, full = call.query, call.corner, call.tiles.q, call.full.q
    if query.query_half is not None:
        mbarrier.expect(full, ROWS * (LATENT + (ROPE if PLAN.has_rope else 0)) * 2)
        tma_load(query.query_half, [request, corner.token, corner.head, 0], full, q.left.index(0))
        tma_load(query.query_half, [request, corner.token, corner.head, HALF], full, q.right.index(0))
    else:
        _copy(q.left, query, request, call.work, 0, HALF)
        _copy(q.right, query, request, call.work, HALF, HALF)


@gluon.jit
def load_query_ropes(call, request, PLAN: gl.constexpr):
    """Begin to load the rest of the queries, if there is any."""
    query, corner, rope = call.query, call.corner, call.tiles.q.rope
    if PLAN.has_rope:
        if query.query_half is not None:
            tma_load(query.query_rope, [request, corner.token, corner.head, LATENT], call.full.q, rope.index(0))
        else:
            _copy(rope, query, request, call.work, LATENT, ROPE)


@gluon.jit
def signal_queries(call):
    """Say that the queries have come, where TMA does not."""
    if call.query.query_half is None:
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(call.full.q)


@gluon.jit
def _copy(tile, query, request, work, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    pointers, in_use = query_pointers(query, request, work.group, ROWS, FIRST_COL, COLS)
    cp_async(tile.index(0), pointers, mask=in_use)


@gluon.jit
def query_pointers(query, request, group, ROW_COUNT: gl.constexpr, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    """Where the numbers [rows, columns] of a request's queries lie, from the group's first row on, and which rows there
    are [rows, 1]."""
    row = group.first_row + gl.arange(0, ROW_COUNT, gl.SliceLayout(1, COPY))
    head = group.kv_head * query.heads + row % query.heads
    offset = (
        request.to(gl.int64) * query.q_stride_request
        + (row // query.heads).to(gl.int64) * query.q_stride_token
        + head.to(gl.int64) * query.q_stride_head
    )
    col = FIRST_COL + gl.arange(0, COLS, gl.SliceLayout(0, COPY))
    return query.q + (offset * 8)[:, None] + col[None, :], (row < query.rows)[:, None]


class Keys(NamedTuple):
    """Descriptors of the cache [pages, page_size, h_kv, d]: of boxes 256 wide, and of the rope (None without)."""

    keys_half: Any
    keys_rope: Any


@gluon.jit
def find_box(page, block, NUMBER: gl.constexpr, PLAN: gl.constexpr):
    """Page and first token of a block's box. ``page`` as ``schedule.page_of`` has it."""
    BOXES: gl.constexpr = KEYS // PLAN.box
    if BOXES > 1:
        page = of_lane(page, NUMBER)
    return page, (block * BOXES + NUMBER) % PLAN.boxes_per_page * PLAN.box


@gluon.jit
def load_boxes(descriptor, tile, full, page, block, kv_head, COL: gl.constexpr, PLAN: gl.constexpr):
    """Begin to load the descriptor's columns from COL of a block into a tile [64, n]. Of a page -1 TMA writes zeros and
    reads nothing."""
    for box in gl.static_range(KEYS // PLAN.box):
        box_page, token = find_box(page, block, box, PLAN)
        rows = tile.slice(box * PLAN.box, PLAN.box, dim=0)
        tma_load(descriptor, [box_page, token, kv_head, COL], full, rows)


@gluon.jit
def _load_left(call, k, full, page, block, PLAN: gl.constexpr):
    mbarrier.expect(full.left, KEYS * HALF * 2)
    load_boxes(call.keys.keys_half, k.left.index(0), full.left, page, block, call.work.group.kv_head, 0, PLAN)


@gluon.jit
def _load_right(call, k, full, page, block, PLAN: gl.constexpr):
    keys, kv_head = call.keys, call.work.group.kv_head
    if keys.keys_rope is not None:
        mbarrier.expect(full.right, KEYS * (HALF + ROPE) * 2)
        load_boxes(keys.keys_rope, k.rope.index(0), full.right, page, block, kv_head, LATENT, PLAN)
    else:
        mbarrier.expect(full.right, KEYS * HALF * 2)
    load_boxes(keys.keys_half, k.right.index(0), full.right, page, block, kv_head, HALF, PLAN)


@gluon.jit
def finish(call, PLAN: gl.constexpr):
    """When the last block is under way: what the combine kernel needs, and the consumers' last arrivals."""
    if call.results.scratch is not None:
        schedule.write_metadata(call.results.scratch, call.work, PLAN)
    barriers.wait(Q_EMPTY, barriers.ALL)
    finish_producing(128)


@gluon.jit
def produce(call, PLAN: gl.constexpr):
    table, k0, k1, full = call.table, call.tiles.k0, call.tiles.k1, call.full
    cta_range = call.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, call.key_lengths)
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, call.work, PLAN)
        cost += PLAN.overhead + split.steps
        if split.end > split.begin:
            page0 = schedule.page_of(table, split, 2 * split.begin, PLAN)
            page1 = schedule.page_of(table, split, 2 * split.begin + 1, PLAN)
            barriers.wait(Q_EMPTY, barriers.ALL)
            load_queries(call, item, PLAN)
            for step in range(split.begin, split.end):
                block = 2 * step
                if PLAN.box == KEYS:
                    page1 = gl.where(block + 1 < split.boxes, page1, -1)
                barriers.wait(K0_LEFT_EMPTY, barriers.PAIR)
                _load_left(call, k0, full.k0, page0, block, PLAN)
                barriers.wait(K0_RIGHT_EMPTY, barriers.PAIR)
                if step == split.begin:
                    # They lie where P of block 0 did, whose last reader has just let go of block 0's right half.
                    load_query_ropes(call, item, PLAN)
                _load_right(call, k0, full.k0, page0, block, PLAN)
                barriers.wait(K1_LEFT_EMPTY, barriers.PAIR)
                _load_left(call, k1, full.k1, page1, block + 1, PLAN)
                barriers.wait(K1_RIGHT_EMPTY, barriers.PAIR)
                _load_right(call, k1, full.k1, page1, block + 1, PLAN)
                if step == split.begin:
                    signal_queries(call)
                # Read after this step's loads, which would else wait for the numbers.
                page0 = schedule.page_of(table, split, block + 2, PLAN)
                page1 = schedule.page_of(table, split, block + 3, PLAN)
        length = device.key_count(item + 1, call.key_lengths)
    finish(call, PLAN)
