"""Logits of a few queries per request with paged keys; docs/kernels/index-logits.md explains the schedule."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from flashlatte.kernels.hopper.barriers import allocate_mbarrier
from flashlatte.ops.index_logits.hopper import split
from flashlatte.ops.index_logits.hopper.scores import LogitsOutput, logits_layout, store, sum_over_heads
from flashlatte.ops.index_logits.hopper.tiles import (
    CONSUMER_REGISTERS,
    KEYS,
    PRODUCER_REGISTERS,
    allocate_rings,
    scores_layout,
    wait_empty,
    wait_full,
)
from flashlatte.ops.index_logits.key_ranges import LogitRows, QueryLengths
from flashlatte.runtime.gluon_compat import tma_load
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64, Pointer
from flashlatte.runtime.triton_kernel import gluon_kernel

# Slots of the ring of keys (even, because each slot belongs to one consumer), and of the ring of queries.
SLOTS = gl.constexpr(16)
Q_SLOTS = gl.constexpr(2)

# TMA destinations are aligned to 128 bytes, so a slot of the ring has at least 32 float32 weights.
MIN_WEIGHTS = gl.constexpr(32)

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
def _look_up(cache, request, first_key, BOX: gl.constexpr):
    """Start loading the block table entries of the next ``_LOOKUP`` boxes of keys; -1 after its end."""
    column = (first_key + gl.arange(0, _LOOKUP, _ONE_EACH) * BOX) // cache.page_size
    row = cache.block_table + request.to(gl.int64) * cache.table_stride
    return gl.load(row + column, mask=column < cache.table_columns, other=-1)


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
def prefetch_descriptors(cache, shared, fetched, BOX: gl.constexpr):
    """Issue a dummy copy with each descriptor into the last slot, which is used much later.

    The first copy with a descriptor loads the descriptor from memory. Here that overlaps with the loads of the lengths.
    """
    HEAD_DIM: gl.constexpr = shared.q.shape[2]
    mbarrier.expect(fetched, BOX * (HEAD_DIM + 4))
    vectors, scales = shared.k.index(SLOTS - 1).slice(0, BOX), shared.k_scale.index(SLOTS - 1).slice(0, BOX)
    _load_keys(cache, -1, 0, fetched, vectors, scales)


@gluon.jit
def produce(queries, cache, lengths, segment, shared, descriptors_fetched, BOX: gl.constexpr, HEADS: gl.constexpr):
    COLUMNS: gl.constexpr = shared.q.shape[1]
    HEAD_DIM: gl.constexpr = shared.q.shape[2]
    BOXES: gl.constexpr = KEYS // BOX
    segments_done = 0
    step = 0
    mbarrier.wait(descriptors_fetched, 0)
    while segment.tiles > 0:
        wait_empty(shared.q_empty, segments_done, Q_SLOTS)
        full = shared.q_full.index(segments_done % Q_SLOTS)
        mbarrier.expect(full, COLUMNS * HEAD_DIM + 4 * shared.weights.shape[1])
        row = (segment.request * lengths.next_n + segment.token) * HEADS
        tma_load(queries.q, [row, 0], full, shared.q.index(segments_done % Q_SLOTS))
        tma_load(queries.weights, [row], full, shared.weights.index(segments_done % Q_SLOTS))
        segments_done += 1

        next_entries = _look_up(cache, segment.request, segment.key, BOX)
        # A separate value: Gluon treats two names of one value as one loop-carried variable.
        entries = gl.zeros_like(next_entries)
        offset = segment.key % cache.page_size
        for tile in range(segment.tiles):
            box = tile * BOXES % _LOOKUP
            if box == 0:
                entries = next_entries
                next_entries = _look_up(cache, segment.request, segment.key + tile * KEYS + _LOOKUP * BOX, BOX)
            wait_empty(shared.k_empty, step, SLOTS)
            slot = step % SLOTS
            full = shared.k_full.index(slot)
            mbarrier.expect(full, KEYS * (HEAD_DIM + 4))
            for box_in_tile in gl.static_range(BOXES):
                page = _page(cache, entries, box + box_in_tile)
                vectors = shared.k.index(slot).slice(box_in_tile * BOX, BOX)
                scales = shared.k_scale.index(slot).slice(box_in_tile * BOX, BOX)
                _load_keys(cache, page, offset, full, vectors, scales)
                offset += BOX
                offset = gl.where(offset == cache.page_size, 0, offset)
            step += 1
        segment = split.next_segment(lengths, segment)


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
def consume(lengths, segment, shared, output, CONSUMER: gl.constexpr, HEADS: gl.constexpr):
    """Compute the logits of every second tile of keys."""
    COLUMNS: gl.constexpr = shared.q.shape[1]
    QUERIES: gl.constexpr = COLUMNS // HEADS
    SCORES: gl.constexpr = scores_layout(COLUMNS)
    segments_done = 0
    step = 0
    while segment.tiles > 0:
        rows = _rows(lengths, segment, output, QUERIES)
        q_slot = segments_done % Q_SLOTS
        wait_full(shared.q_full, segments_done, Q_SLOTS)
        weights = shared.weights.index(q_slot).slice(0, COLUMNS).load(gl.SliceLayout(0, SCORES))
        for tile in range((step + CONSUMER) % 2, segment.tiles, 2):
            position = step + tile
            wait_full(shared.k_full, position, SLOTS)
            q = shared.q.index(q_slot + (position >> 30)).permute((1, 0))
            scores = gl.zeros([KEYS, COLUMNS], gl.float32, SCORES)
            scores = warpgroup_mma(shared.k.index(position % SLOTS), q, scores, use_acc=False, is_async=True)
            scale = shared.k_scale.index(position % SLOTS).load(gl.SliceLayout(1, logits_layout(QUERIES)))
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(shared.k_empty.index(position % SLOTS), count=1)
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
):
    """The tiles of all requests, divided evenly among the programs. Arguments as in ``launch``."""
    # The kernel that reads the logits may launch now; it waits for this one.
    gdc_launch_dependents()
    first_lengths = split.read_first_lengths(lengths)
    shared = allocate_rings(Q_SLOTS, 1, COLUMNS, max(COLUMNS, MIN_WEIGHTS), SLOTS, 1, HEAD_DIM)
    descriptors_fetched = allocate_mbarrier()
    prefetch_descriptors(cache, shared, descriptors_fetched, BOX)
    segment = split.first_segment(lengths, first_lengths)
    gl.warp_specialize(
        [
            (consume, (lengths, segment, shared, output, 0, HEADS)),
            (consume, (lengths, segment, shared, output, 1, HEADS)),
            (produce, (queries, cache, lengths, segment, shared, descriptors_fetched, BOX, HEADS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
