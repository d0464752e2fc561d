"""The producer: four warps that fill the tiles by TMA; queries by cp.async if TMA cannot copy them."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_pipeline import finish_producer
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
from flashlatte.kernels.hopper.ptx import copies
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.ptx.threads import shuffle_from_lane
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.tiles import Q_EMPTY
from flashlatte.runtime.gluon_compat import cp_async, tma_load
from flashlatte.runtime.kernel_records import Int32, Int64, Pointer
from flashlatte.split_kv import device

# PTX name of the kernel's first parameter, the descriptor of keys.
_DESCRIPTOR = gl.constexpr("dense_decode_kernel_param_0")


class QueryRope(NamedTuple):
    """The rope of the queries, if it is not in ``DenseDecodeQuery.q``: None and zeros otherwise."""

    q_rope: Pointer
    stride_request: Int64
    stride_token: Int64
    stride_head: Int64


class DenseDecodeQuery(NamedTuple):
    """The queries, with strides in units of 8 elements (16 bytes). ``heads``: rows per token; ``rows``: rows per kv
    head.

    ``half`` and ``rope`` are descriptors of the latent part and of the rope for boxes of tokens and heads with 64 rows;
    None if there are no such boxes.
    """

    half: Pointer
    rope: Pointer
    q: Pointer
    stride_request: Int64
    stride_token: Int64
    stride_head: Int64
    heads: Int32
    rows: Int32
    separate: QueryRope


class QueryTileOrigin(NamedTuple):
    """Origin of a CTA's tile of 64 query rows."""

    token: Any
    head: Any


@gluon.jit
def find_query_origin(query, group):
    """The tile origin; opaque, so that it is computed here, before the lengths are available, and not at each load of
    queries."""
    token = group.first_row // query.heads
    head = group.kv_head * query.heads + group.first_row - token * query.heads
    return QueryTileOrigin(opaque(token), opaque(head))


@gluon.jit
def load_queries(args, request, CONFIG: gl.constexpr):
    """Start loading the queries of a request, without their rope."""
    query, query_origin, q, full = args.query, args.query_origin, args.tiles.q, args.full.q
    if query.half is not None:
        mbarrier.expect(full, ROWS * (LATENT + (ROPE if CONFIG.has_rope else 0)) * 2)
        tma_load(query.half, [request, query_origin.token, query_origin.head, 0], full, q.left.index(0))
        tma_load(query.half, [request, query_origin.token, query_origin.head, HALF], full, q.right.index(0))
    else:
        _copy(q.left, query, request, args.work, 0, HALF)
        _copy(q.right, query, request, args.work, HALF, HALF)


@gluon.jit
def load_query_ropes(args, request, CONFIG: gl.constexpr):
    """Start loading the rope of the queries, if any."""
    query, query_origin, rope = args.query, args.query_origin, args.tiles.q.rope
    if CONFIG.has_rope:
        if query.half is not None:
            col = LATENT if query.separate.q_rope is None else 0
            tma_load(query.rope, [request, query_origin.token, query_origin.head, col], args.full.q, rope.index(0))
        else:
            _copy(rope, query, request, args.work, LATENT, ROPE)


@gluon.jit
def signal_queries(args):
    """Signal that the queries have arrived, if they are not loaded by TMA."""
    if args.query.half is None:
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(args.full.q)


@gluon.jit
def _copy(tile, query, request, work, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    pointers, in_use = query_pointers(query, request, work.group, ROWS, FIRST_COL, COLS)
    cp_async(tile.index(0), pointers, mask=in_use)


@gluon.jit
def query_pointers(
    query,
    request,
    group,
    ROW_COUNT: gl.constexpr,
    FIRST_COL: gl.constexpr,
    COLS: gl.constexpr,
    FIRST_ROW: gl.constexpr = 0,
):
    """Pointers [rows, columns] to a request's queries from row FIRST_ROW of the group on, and the mask [rows, 1] of
    existing rows. The columns are of the latent part, or all of the rope."""
    row = group.first_row + FIRST_ROW + gl.arange(0, ROW_COUNT, gl.SliceLayout(1, COPY))
    head = group.kv_head * query.heads + row % query.heads
    SEPARATE: gl.constexpr = FIRST_COL == LATENT and query.separate.q_rope is not None
    strides = query.separate if SEPARATE else query
    offset = (
        request.to(gl.int64) * strides.stride_request
        + (row // query.heads).to(gl.int64) * strides.stride_token
        + head.to(gl.int64) * strides.stride_head
    )
    col = (0 if SEPARATE else FIRST_COL) + gl.arange(0, COLS, gl.SliceLayout(0, COPY))
    first = query.separate.q_rope if SEPARATE else query.q
    return first + (offset * 8)[:, None] + col[None, :], (row < query.rows)[:, None]


class KeyDescriptors(NamedTuple):
    """TMA descriptors of the cache [pages, page_size, h_kv, d]: of boxes of 256 columns, and of the rope (None without
    rope)."""

    half: Pointer
    rope: Pointer


@gluon.jit
def find_box(page, block, NUMBER: gl.constexpr, CONFIG: gl.constexpr):
    """Page and first token of box NUMBER of a block. ``page``: from ``schedule.page_of``."""
    BOXES: gl.constexpr = KEYS // CONFIG.box
    if BOXES > 1:
        page = shuffle_from_lane(page, NUMBER)
    return page, (block * BOXES + NUMBER) % CONFIG.boxes_per_page * CONFIG.box


@gluon.jit
def load_boxes(descriptor, tile, full, page, block, kv_head, COL: gl.constexpr, CONFIG: gl.constexpr):
    """Start loading columns from COL of a block into a tile [64, n]. For page -1, TMA fills zeros without reading
    memory."""
    for box in gl.static_range(KEYS // CONFIG.box):
        box_page, token = find_box(page, block, box, CONFIG)
        rows = tile.slice(box * CONFIG.box, CONFIG.box, dim=0)
        tma_load(descriptor, [box_page, token, kv_head, COL], full, rows)


@gluon.jit
def load_in_order(args, load_block: gl.constexpr, CONFIG: gl.constexpr):
    """Load the blocks of the CTA's work one after another, into a ring of slots.

    ``load_block``: (args, slot, page, block, CONFIG), starts loading a block and returns the next block's slot.
    """
    table, cta_range = args.table, args.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, args.key_lengths)
    slot = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, args.work, CONFIG)
        cost += CONFIG.overhead + split.steps
        # Without this condition Triton 3.6 uses the first request's bounds for all requests (triton-lang/triton#9036).
        if split.end > split.begin:
            page = schedule.page_of(table, split, 2 * split.begin, CONFIG)
            for block in range(2 * split.begin, 2 * split.end):
                if CONFIG.box == KEYS:
                    page = gl.where(block < split.boxes, page, -1)
                next_page = schedule.page_of(table, split, block + 1, CONFIG)
                slot = load_block(args, slot, page, block, CONFIG)
                page = next_page
        length = device.key_count(item + 1, args.key_lengths)


@gluon.jit
def _load_left(args, k, full, page, block, CONFIG: gl.constexpr):
    mbarrier.expect(full.left, KEYS * HALF * 2)
    load_boxes(args.keys.half, k.left.index(0), full.left, page, block, args.work.group.kv_head, 0, CONFIG)


@gluon.jit
def _load_right(args, k, full, page, block, CONFIG: gl.constexpr):
    keys, kv_head = args.keys, args.work.group.kv_head
    if keys.rope is not None:
        mbarrier.expect(full.right, KEYS * (HALF + ROPE) * 2)
        load_boxes(keys.rope, k.rope.index(0), full.right, page, block, kv_head, LATENT, CONFIG)
    else:
        mbarrier.expect(full.right, KEYS * HALF * 2)
    load_boxes(keys.half, k.right.index(0), full.right, page, block, kv_head, HALF, CONFIG)


@gluon.jit
def prefetch_block(args, page, block, CONFIG: gl.constexpr):
    """Prefetch a block into L2 by TMA; for page -1, it reads no memory. Prefetches by threads would compete with
    shared-memory accesses, a cycle per line."""
    # The descriptor's elements have two bytes.
    columns: gl.constexpr = (LATENT + (ROPE if CONFIG.has_rope else 0)) // (2 if CONFIG.one_byte else 1)
    for box in gl.static_range(KEYS // CONFIG.box):
        box_page, token = find_box(page, block, box, CONFIG)
        copies.prefetch_boxes_l2(_DESCRIPTOR, box_page, token, args.work.group.kv_head, columns)


@gluon.jit
def _prefetch_step(args, page0, page1, block, CONFIG: gl.constexpr):
    """Prefetch the blocks ``block`` and ``block`` + 1, with their pages. The first two row groups of a kv head, which
    read the same keys, prefetch one block each."""
    first_row = args.work.group.first_row
    if first_row == 0:
        prefetch_block(args, page0, block, CONFIG)
    elif first_row == ROWS:
        prefetch_block(args, page1, block + 1, CONFIG)


@gluon.jit
def finish(args, CONFIG: gl.constexpr):
    """After the last block has been issued: write the split metadata, and wait for the consumers' last arrivals."""
    if args.results.scratch is not None:
        schedule.write_metadata(args.results.scratch, args.work, CONFIG)
    barriers.wait(Q_EMPTY, barriers.ALL_THREADS)
    finish_producer(128)


@gluon.jit
def produce(args, CONFIG: gl.constexpr):
    table, k0, k1, full = args.table, args.tiles.k0, args.tiles.k1, args.full
    cta_range = args.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, args.key_lengths)
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, args.work, CONFIG)
        cost += CONFIG.overhead + split.steps
        if split.end > split.begin:
            page0 = schedule.page_of(table, split, 2 * split.begin, CONFIG)
            page1 = schedule.page_of(table, split, 2 * split.begin + 1, CONFIG)
            barriers.wait(Q_EMPTY, barriers.ALL_THREADS)
            load_queries(args, item, CONFIG)
            for step in range(split.begin, split.end):
                block = 2 * step
                if CONFIG.box == KEYS:
                    page1 = gl.where(block + 1 < split.boxes, page1, -1)
                barriers.wait(K0_LEFT_EMPTY, barriers.PAIR_THREADS)
                _load_left(args, k0, full.k0, page0, block, CONFIG)
                barriers.wait(K0_RIGHT_EMPTY, barriers.PAIR_THREADS)
                if step == split.begin:
                    # They overwrite P of block 0, whose last reader has just released the right half of block 0.
                    load_query_ropes(args, item, CONFIG)
                _load_right(args, k0, full.k0, page0, block, CONFIG)
                barriers.wait(K1_LEFT_EMPTY, barriers.PAIR_THREADS)
                _load_left(args, k1, full.k1, page1, block + 1, CONFIG)
                barriers.wait(K1_RIGHT_EMPTY, barriers.PAIR_THREADS)
                _load_right(args, k1, full.k1, page1, block + 1, CONFIG)
                if step == split.begin:
                    signal_queries(args)
                # Loaded after this step's copies, which would otherwise wait for the pages.
                page0 = schedule.page_of(table, split, block + 2, CONFIG)
                page1 = schedule.page_of(table, split, block + 3, CONFIG)
                if CONFIG.prefetch and step + 1 < split.end:
                    _prefetch_step(args, page0, page1, block + 2, CONFIG)
        length = device.key_count(item + 1, args.key_lengths)
    finish(args, CONFIG)
