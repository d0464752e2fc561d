"""The producer: four warps that keep the tiles filled, by TMA, or by cp.async for queries that TMA cannot copy."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from flashlatte.kernels.hopper import barriers
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
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.tiles import Q_EMPTY
from flashlatte.runtime.gluon_compat import cp_async, tma_load
from flashlatte.split_kv import device


class Query(NamedTuple):
    """The queries, their strides in units of 8 numbers (16 bytes); ``heads`` rows a token, ``rows`` a kv head.

    ``half`` and ``rope`` are descriptors of q, of boxes of tokens and heads that make 64 rows; None where none do.
    """

    q: Any
    stride_request: Any
    stride_token: Any
    stride_head: Any
    heads: Any
    rows: Any
    half: Any
    rope: Any


class Keys(NamedTuple):
    """Descriptors of the cache [pages, page_size, h_kv, d]: of tiles 256 wide, and of the rope (None without)."""

    half: Any
    rope: Any


class Corner(NamedTuple):
    """Token and head of the first of a program's 64 rows."""

    token: Any
    head: Any


@gluon.jit
def find_corner(query, group):
    """Found early, while lengths are on their way."""
    token = group.first_row // query.heads
    return Corner(token, group.kv_head * query.heads + group.first_row - token * query.heads)


@gluon.jit
def _load_query(tiles, full, query, corner, request, work, HAS_ROPE: gl.constexpr):
    """Begin to load a query, without its rope."""
    if query.half is not None:
        mbarrier.expect(full, ROWS * (LATENT + (ROPE if HAS_ROPE else 0)) * 2)
        tma_load(query.half, [request, corner.token, corner.head, 0], full, tiles.q_left.index(0))
        tma_load(query.half, [request, corner.token, corner.head, HALF], full, tiles.q_right.index(0))
    else:
        _copy_query(tiles.q_left, query, request, work, 0, HALF)
        _copy_query(tiles.q_right, query, request, work, HALF, HALF)


@gluon.jit
def _load_query_rope(tiles, full, query, corner, request, work, HAS_ROPE: gl.constexpr):
    """Begin to load the rest of a query, if there is any."""
    if HAS_ROPE:
        if query.half is not None:
            tma_load(query.rope, [request, corner.token, corner.head, LATENT], full, tiles.q_rope.index(0))
        else:
            _copy_query(tiles.q_rope, query, request, work, LATENT, ROPE)


@gluon.jit
def _signal_query(full, query):
    """Signal a query when it has come, where TMA does not."""
    if query.half is None:
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full)


@gluon.jit
def _copy_query(tile, query, request, work, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    row = work.group.first_row + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    head = work.group.kv_head * query.heads + row % query.heads
    offset = (
        request.to(gl.int64) * query.stride_request
        + (row // query.heads).to(gl.int64) * query.stride_token
        + head.to(gl.int64) * query.stride_head
    )
    col = FIRST_COL + gl.arange(0, COLS, gl.SliceLayout(0, COPY))
    pointers = query.q + (offset * 8)[:, None] + col[None, :]
    cp_async(tile.index(0), pointers, mask=(row < query.rows)[:, None])


@gluon.jit
def _load_left(keys, tile, full, page, token, kv_head):
    mbarrier.expect(full, KEYS * HALF * 2)
    tma_load(keys.half, [page, token, kv_head, 0], full, tile.index(0))


@gluon.jit
def _load_right(keys, tile, rope_tile, full, page, token, kv_head):
    if keys.rope is not None:
        mbarrier.expect(full, KEYS * (HALF + ROPE) * 2)
        tma_load(keys.rope, [page, token, kv_head, LATENT], full, rope_tile.index(0))
    else:
        mbarrier.expect(full, KEYS * HALF * 2)
    tma_load(keys.half, [page, token, kv_head, HALF], full, tile.index(0))


@gluon.jit
def produce(query, corner, keys, table, lists, work, tiles, full, scratch, PLAN: gl.constexpr):
    cta_range = work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, lists)
    for item in range(cta_range.first, cta_range.stop):
        steps = schedule.num_steps(length)
        begin, end = device.split_of(cta_range, cost, steps, PLAN.overhead)
        blocks = schedule.num_blocks(length)
        cost += PLAN.overhead + steps
        if end > begin:
            page0 = schedule.page_of(table, item, 2 * begin, blocks, PLAN)
            page1 = schedule.page_of(table, item, 2 * begin + 1, blocks, PLAN)
            barriers.wait(Q_EMPTY, barriers.ALL)
            _load_query(tiles, full.q, query, corner, item, work, PLAN.has_rope)
            for step in range(begin, end):
                block = 2 * step
                token0 = block % PLAN.blocks_per_page * KEYS
                token1 = (block + 1) % PLAN.blocks_per_page * KEYS
                # Out of range, so that TMA writes zeros without reading.
                page1 = gl.where(block + 1 < blocks, page1, -1)
                barriers.wait(K0_LEFT_EMPTY, barriers.PAIR)
                _load_left(keys, tiles.k0_left, full.k0_left, page0, token0, work.group.kv_head)
                barriers.wait(K0_RIGHT_EMPTY, barriers.PAIR)
                if step == begin:
                    # P that lay here was read with block 0's right half.
                    _load_query_rope(tiles, full.q, query, corner, item, work, PLAN.has_rope)
                _load_right(keys, tiles.k0_right, tiles.k0_rope, full.k0_right, page0, token0, work.group.kv_head)
                barriers.wait(K1_LEFT_EMPTY, barriers.PAIR)
                _load_left(keys, tiles.k1_left, full.k1_left, page1, token1, work.group.kv_head)
                barriers.wait(K1_RIGHT_EMPTY, barriers.PAIR)
                _load_right(keys, tiles.k1_right, tiles.k1_rope, full.k1_right, page1, token1, work.group.kv_head)
                if step == begin:
                    _signal_query(full.q, query)
                # Not before this step's loads, which would wait for the numbers.
                page0 = schedule.page_of(table, item, block + 2, blocks, PLAN)
                page1 = schedule.page_of(table, item, block + 3, blocks, PLAN)
        length = device.key_count(item + 1, lists)
    if scratch is not None:
        schedule.write_metadata(scratch, work, PLAN)
    # The consumers' last arrivals.
    barriers.wait(Q_EMPTY, barriers.ALL)
    barriers.wait(K0_LEFT_EMPTY, barriers.PAIR)
    barriers.wait(K0_RIGHT_EMPTY, barriers.PAIR)
    barriers.wait(K1_RIGHT_EMPTY, barriers.PAIR)
    barriers.wait(K1_LEFT_EMPTY, barriers.PAIR)
    # The combine may be launched, and waits for what the consumers still write. Earlier, its programs would crowd on
    # the few SMs that are free first.
    gdc_launch_dependents()
