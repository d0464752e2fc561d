"""Logits of a few queries per request with paged keys; docs/kernels/index-logits.md explains the schedule."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.barriers import allocate_uninitialized_mbarriers, initialize_mbarriers
from flashlatte.ops.index_logits.hopper import split
from flashlatte.ops.index_logits.hopper.scores import LogitsOutput, logits_layout, store, sum_over_heads
from flashlatte.ops.index_logits.hopper.tiles import (
    KEYS,
    allocate_rings,
    initialize_rings,
    scores_layout,
    wait_empty,
    wait_full,
)
from flashlatte.ops.index_logits.key_ranges import LogitRows, QueryLengths
from flashlatte.runtime.gluon_compat import tma_load
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64, Pointer
from flashlatte.runtime.triton_kernel import gluon_kernel

# Slots of the ring of keys, in pairs of a slot for each consumer that share barriers; and of the ring of queries.
PAIRS = gl.constexpr(8)
SLOTS = gl.constexpr(16)
Q_SLOTS = gl.constexpr(2)

# Registers per thread of a consumer, and of the producer, whose single warp counts as four. With 24 it spills 286 times
# with a length per query.
_CONSUMER_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(40)

# TMA destinations are aligned to 128 bytes, so a slot of the ring has at least 32 float32 weights.
MIN_WEIGHTS = gl.constexpr(32)

# Named barrier: the mbarriers are initialized. The producer's warp, which has initialized them, arrives; both consumers
# wait before they use one.
_INITIALIZED = gl.constexpr(barriers.FIRST_FREE)
_INITIALIZED_THREADS = gl.constexpr(288)

# Boxes of keys whose pages the producer looks up at a time: one per lane.
_LOOKUP = gl.constexpr(32)
_ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


class IndexCache(NamedTuple):
    """The cache and the block table.

    Attributes:
        k: TMA descriptor of e4m3 vectors [pages, page_size, D], for boxes of ``BOX`` keys.
        k_scale: TMA descriptor of float32 [pages, page_size · (D + 4) / 4], for boxes of ``BOX``; scales follow the
            vectors of a page.
        pages, page_size: size of the cache.
        block_table, table_stride, table_columns: pages of each request.
    """

    k: Pointer
    k_scale: Pointer
    pages: Int32
    page_size: Int32
    block_table: ElementPointer
    table_stride: Int64
    table_columns: Int32


class PagedLogitsQueries(NamedTuple):
    """TMA descriptors of q [b · next_n · H, D] and weights [b · next_n · H].

    A box holds one row per column of a tile, and at least ``MIN_WEIGHTS`` weights.
    """

    q: Pointer
    weights: Pointer


@gluon.jit
def _look_up(cache, request, first_box, boxes, BOX: gl.constexpr, ONE_BOX: gl.constexpr):
    """Start loading the block table entries of the next ``_LOOKUP`` of ``boxes`` boxes of keys; -1 after its end."""
    box = gl.arange(0, _LOOKUP, _ONE_EACH)
    column = first_box + box
    if not ONE_BOX:
        column = split.quotient(column, split.quotient(cache.page_size, BOX))
    row = cache.block_table + request.to(gl.int64) * cache.table_stride
    return gl.load(row + column, mask=(box < boxes) & (column < cache.table_columns), other=-1)


@gluon.jit
def _page(cache, entries, box):
    """The page of a box, or -1 if it is not in the cache: TMA then fills zeros."""
    page = gl.where((entries >= 0) & (entries < cache.pages), entries, -1).to(gl.int32)
    return gl.sum(gl.where(gl.arange(0, _LOOKUP, _ONE_EACH) == box, page, 0), 0)


@gluon.jit
def _load_keys(cache, page, offset, full, vectors, scales):
    """Start loading a box of keys: vectors [BOX, D] and scales [BOX]."""
    HEAD_DIM: gl.constexpr = vectors.shape[1]
    tma_load(cache.k, [page, offset, 0], full, vectors)
    tma_load(cache.k_scale, [page, cache.page_size * (HEAD_DIM // 4) + offset], full, scales)


@gluon.jit
def _load_queries(queries, row, full, vectors, weights):
    """Start loading the queries and weights of a tile, from row ``row`` on."""
    tma_load(queries.q, [row, 0], full, vectors)
    tma_load(queries.weights, [row], full, weights)


@gluon.jit
def prefetch_descriptors(queries, cache, shared, fetched, BOX: gl.constexpr):
    """Issue a dummy copy with each descriptor, from outside of its tensor, into the last slots, which are used later.

    The first copy with a descriptor loads the descriptor from memory. Here that overlaps with the loads of the lengths.
    """
    COLUMNS: gl.constexpr = shared.q.shape[1]
    HEAD_DIM: gl.constexpr = shared.q.shape[2]
    WEIGHTS: gl.constexpr = shared.weights.shape[1]
    mbarrier.expect(fetched, BOX * (HEAD_DIM + 4) + COLUMNS * HEAD_DIM + 4 * WEIGHTS)
    vectors, scales = shared.k.index(SLOTS - 1).slice(0, BOX), shared.k_scale.index(SLOTS - 1).slice(0, BOX)
    _load_keys(cache, -1, 0, fetched, vectors, scales)
    _load_queries(queries, -WEIGHTS, fetched, shared.q.index(Q_SLOTS - 1), shared.weights.index(Q_SLOTS - 1))


@gluon.jit
def produce(
    queries,
    cache,
    lengths,
    shared,
    descriptors_fetched,
    HEADS: gl.constexpr,
    BOX: gl.constexpr,
    ONE_BOX: gl.constexpr,
):
    COLUMNS: gl.constexpr = shared.q.shape[1]
    HEAD_DIM: gl.constexpr = shared.q.shape[2]
    BOXES: gl.constexpr = KEYS // BOX
    initialize_mbarriers(descriptors_fetched, 1)
    descriptors_fetched = descriptors_fetched.index(0)
    prefetch_descriptors(queries, cache, shared, descriptors_fetched, BOX)
    initialize_rings(shared, 2)
    barriers.arrive(_INITIALIZED, _INITIALIZED_THREADS, 32)
    gdc_wait()
    segment = split.first_segment(lengths)
    segments_done = 0
    step = 0
    while segment.tiles > 0:
        first_box = split.quotient(segment.key, BOX)
        boxes = segment.tiles * BOXES
        entries = _look_up(cache, segment.request, first_box, boxes, BOX, ONE_BOX)
        wait_empty(shared.q_empty, segments_done, Q_SLOTS)
        q_slot = segments_done % Q_SLOTS
        full = shared.q_full.index(q_slot)
        mbarrier.expect(full, COLUMNS * HEAD_DIM + 4 * shared.weights.shape[1])
        row = (segment.request * lengths.next_n + segment.token) * HEADS
        _load_queries(queries, row, full, shared.q.index(q_slot), shared.weights.index(q_slot))
        segments_done += 1

        # Before the copies into the last slots. After the first segment it returns at once.
        mbarrier.wait(descriptors_fetched, 0)
        offset = segment.key % cache.page_size
        for looked_up in range(0, boxes, _LOOKUP):
            left = boxes - looked_up - _LOOKUP
            next_entries = _look_up(cache, segment.request, first_box + looked_up + _LOOKUP, left, BOX, ONE_BOX)
            for box in range(0, gl.minimum(boxes - looked_up, _LOOKUP), BOXES):
                pair = step // 2
                full = shared.k_full.index(pair % PAIRS)
                # Each consumer has read its tile of the pair, so that this covers the pair's second tile, too.
                if step % 2 == 0:
                    wait_empty(shared.k_empty, pair, PAIRS)
                mbarrier.expect(full, KEYS * (HEAD_DIM + 4))
                slot = step % SLOTS
                for box_in_tile in gl.static_range(BOXES):
                    page = _page(cache, entries, box + box_in_tile)
                    vectors = shared.k.index(slot).slice(box_in_tile * BOX, BOX)
                    scales = shared.k_scale.index(slot).slice(box_in_tile * BOX, BOX)
                    if ONE_BOX:
                        _load_keys(cache, page, 0, full, vectors, scales)
                    else:
                        _load_keys(cache, page, offset, full, vectors, scales)
                        offset += BOX
                        offset = gl.where(offset == cache.page_size, 0, offset)
                step += 1
            entries = next_entries
        segment = split.next_segment(lengths, segment)
    # In place of the second tile of the last pair.
    if step % 2 == 1:
        mbarrier.arrive(shared.k_full.index(step // 2 % PAIRS), count=1)
    # A program without keys, too, must not exit before the copies have arrived in its shared memory.
    mbarrier.wait(descriptors_fetched, 0)


@gluon.jit
def _rows(lengths, segment, output, QUERIES: gl.constexpr):
    token = segment.token + gl.arange(0, QUERIES, gl.SliceLayout(0, logits_layout(QUERIES)))
    is_query = token < lengths.next_n
    # The token stride is 0 with one length per request.
    length = lengths.lengths + segment.request.to(gl.int64) * lengths.request_stride
    end = gl.load(length + token.to(gl.int64) * lengths.token_stride, mask=is_query, other=0)
    if not lengths.per_query:
        end -= lengths.next_n - 1 - token
    end = gl.where(is_query, gl.minimum(gl.maximum(end, 0), lengths.max_keys), 0).to(gl.int32)
    row = segment.request.to(gl.int64) * lengths.next_n + token
    return LogitRows(gl.zeros_like(end), end, output.logits + row * output.stride)


@gluon.jit
def consume(lengths, shared, output, CONSUMER: gl.constexpr, HEADS: gl.constexpr):
    """Compute the logits of every second tile of keys."""
    COLUMNS: gl.constexpr = shared.q.shape[1]
    QUERIES: gl.constexpr = COLUMNS // HEADS
    SCORES: gl.constexpr = scores_layout(COLUMNS)
    gdc_wait()
    segment = split.first_segment(lengths)
    barriers.wait(_INITIALIZED, _INITIALIZED_THREADS)
    segments_done = 0
    step = 0
    while segment.tiles > 0:
        rows = _rows(lengths, segment, output, QUERIES)
        q_slot = segments_done % Q_SLOTS
        wait_full(shared.q_full, segments_done, Q_SLOTS)
        weights = shared.weights.index(q_slot).slice(0, COLUMNS).load(gl.SliceLayout(0, SCORES))
        for tile in range((step + CONSUMER) % 2, segment.tiles, 2):
            position = step + tile
            wait_full(shared.k_full, position // 2, PAIRS)
            q = shared.q.index(q_slot + (position >> 30)).permute((1, 0))
            scores = gl.zeros([KEYS, COLUMNS], gl.float32, SCORES)
            scores = warpgroup_mma(shared.k.index(position % SLOTS), q, scores, use_acc=False, is_async=True)
            scale = shared.k_scale.index(position % SLOTS).load(gl.SliceLayout(1, logits_layout(QUERIES)))
            scores = warpgroup_mma_wait(0, deps=[scores])
            # One thread arrives for the consumer. Before, Gluon synchronizes the consumer's warps: all of them have
            # read the tile and its scales.
            mbarrier.arrive(shared.k_empty.index(position // 2 % PAIRS), count=1)
            store(sum_over_heads(scores, weights, HEADS) * scale[:, None], segment.key + tile * KEYS, rows)
        mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        segments_done += 1
        step += segment.tiles
        segment = split.next_segment(lengths, segment)


@gluon_kernel
def index_logits_paged_kernel(
    queries: PagedLogitsQueries,
    cache: IndexCache,
    lengths: QueryLengths,
    output: LogitsOutput,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOX: tl.constexpr,
    ONE_BOX: tl.constexpr,
):
    """The tiles of all requests, divided evenly among the programs. Arguments as in ``launch``."""
    # The kernel that reads the logits may launch now; it waits for this one.
    gdc_launch_dependents()
    shared = allocate_rings(Q_SLOTS, 1, COLUMNS, max(COLUMNS, MIN_WEIGHTS), PAIRS, 2, HEAD_DIM)
    descriptors_fetched = allocate_uninitialized_mbarriers(1)
    gl.warp_specialize(
        [
            (consume, (lengths, shared, output, 0, HEADS)),
            (consume, (lengths, shared, output, 1, HEADS)),
            (produce, (queries, cache, lengths, shared, descriptors_fetched, HEADS, BOX, ONE_BOX)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )
