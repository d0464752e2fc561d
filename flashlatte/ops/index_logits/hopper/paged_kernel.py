"""Logits of a few queries of each request against its pages of keys: docs/kernels/index-logits.md."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.ops.index_logits.hopper import split
from flashlatte.ops.index_logits.hopper.scores import Rows, logits_layout, store, sum_over_heads
from flashlatte.ops.index_logits.hopper.tiles import (
    CONSUMER_REGISTERS,
    KEYS,
    barriers,
    numbers_layout,
    scores_layout,
    vectors_layout,
    wait_empty,
    wait_full,
)
from flashlatte.runtime.gluon_compat import tma_load
from flashlatte.runtime.triton_kernel import gluon_kernel

# Of the ring of keys, even as a slot belongs to one consumer, and of the ring of queries.
SLOTS = gl.constexpr(16)
Q_SLOTS = gl.constexpr(2)

# Boxes of keys whose pages the producer looks up at a time: one for each thread of a warp.
_LOOKUP = gl.constexpr(32)


class Cache(NamedTuple):
    """The cache and the way to a request's pages.

    Attributes:
        k: TMA descriptor of e4m3 vectors [pages, page_size, D], of boxes of ``BOX`` keys.
        k_scale: of float32 numbers [pages, page_size · (D + 4) / 4], of ``BOX``; scales stand behind the vectors.
        pages, page_size: of the cache.
        block_table, table_stride, table_columns: pages of each request.
    """

    k: Any
    k_scale: Any
    pages: Any
    page_size: Any
    block_table: Any
    table_stride: Any
    table_columns: Any


class Queries(NamedTuple):
    """TMA descriptors of q [b · next_n · H, D] and weights [b · next_n · H], of boxes of a tile's columns."""

    q: Any
    weights: Any


class Shared(NamedTuple):
    """Rings of queries and of keys."""

    q: Any  # [Q_SLOTS, COLUMNS, D]
    weights: Any  # [Q_SLOTS, COLUMNS]
    q_full: Any
    q_empty: Any
    k: Any  # [SLOTS, 64, D]
    k_scale: Any  # [SLOTS, 64]
    k_full: Any
    k_empty: Any


@gluon.jit
def _pages(cache, request, first_key, BOX: gl.constexpr):
    """Pages of the next ``_LOOKUP`` boxes of keys; -1, which a TMA fills with 0, where there is none."""
    box = gl.arange(0, _LOOKUP, gl.BlockedLayout([1], [32], [4], [0]))
    column = (first_key + box * BOX) // cache.page_size
    row = cache.block_table + request.to(gl.int64) * cache.table_stride
    page = gl.load(row + column, mask=column < cache.table_columns, other=-1)
    return gl.where((page >= 0) & (page < cache.pages), page, -1).to(gl.int32)


@gluon.jit
def _page(pages, box):
    mine = gl.arange(0, _LOOKUP, gl.BlockedLayout([1], [32], [4], [0])) == box
    return gl.sum(gl.where(mine, pages, 0), 0)


@gluon.jit
def produce(queries, cache, work, segment, shared, BOX: gl.constexpr, HEADS: gl.constexpr):
    COLUMNS: gl.constexpr = shared.q.shape[1]
    HEAD_DIM: gl.constexpr = shared.q.shape[2]
    BOXES: gl.constexpr = KEYS // BOX
    segments_done = 0
    step = 0
    while segment.tiles > 0:
        wait_empty(shared.q_empty, segments_done, Q_SLOTS)
        full = shared.q_full.index(segments_done % Q_SLOTS)
        mbarrier.expect(full, COLUMNS * (HEAD_DIM + 4))
        row = (segment.request * work.next_n + segment.token) * HEADS
        tma_load(queries.q, [row, 0], full, shared.q.index(segments_done % Q_SLOTS))
        tma_load(queries.weights, [row], full, shared.weights.index(segments_done % Q_SLOTS))
        segments_done += 1

        upcoming = _pages(cache, segment.request, segment.key, BOX)
        pages = upcoming
        for tile in range(segment.tiles):
            key = segment.key + tile * KEYS
            box = tile * BOXES % _LOOKUP
            if box == 0:
                # One lookup ahead of what is being loaded.
                pages = upcoming
                upcoming = _pages(cache, segment.request, key + _LOOKUP * BOX, BOX)
            wait_empty(shared.k_empty, step, SLOTS)
            slot = step % SLOTS
            full = shared.k_full.index(slot)
            mbarrier.expect(full, KEYS * (HEAD_DIM + 4))
            for part in gl.static_range(BOXES):
                page = _page(pages, box + part)
                offset = (key + part * BOX) % cache.page_size
                vectors = shared.k.index(slot).slice(part * BOX, BOX)
                numbers = shared.k_scale.index(slot).slice(part * BOX, BOX)
                tma_load(cache.k, [page, offset, 0], full, vectors)
                tma_load(cache.k_scale, [page, cache.page_size * (HEAD_DIM // 4) + offset], full, numbers)
            step += 1
        segment = split.next_segment(work, segment)


@gluon.jit
def _rows(work, segment, logits, stride, QUERIES: gl.constexpr):
    token = segment.token + gl.arange(0, QUERIES, gl.SliceLayout(0, logits_layout(QUERIES)))
    is_query = token < work.next_n
    length = work.lengths + segment.request.to(gl.int64) * work.request_stride + token.to(gl.int64) * work.token_stride
    end = gl.load(length, mask=is_query, other=0) - work.shortened * (work.next_n - 1 - token)
    end = gl.where(is_query, gl.minimum(gl.maximum(end, 0), work.most_keys), 0).to(gl.int32)
    row = segment.request.to(gl.int64) * work.next_n + token
    return Rows(gl.zeros_like(end), end, logits + row * stride)


@gluon.jit
def consume(work, segment, shared, logits, stride, WHICH: gl.constexpr, HEADS: gl.constexpr):
    """The logits of every second tile of keys."""
    COLUMNS: gl.constexpr = shared.q.shape[1]
    QUERIES: gl.constexpr = COLUMNS // HEADS
    SCORES: gl.constexpr = scores_layout(COLUMNS)
    segments_done = 0
    step = 0
    while segment.tiles > 0:
        rows = _rows(work, segment, logits, stride, QUERIES)
        q_slot = segments_done % Q_SLOTS
        wait_full(shared.q_full, segments_done, Q_SLOTS)
        weights = shared.weights.index(q_slot).load(gl.SliceLayout(0, SCORES))
        for tile in range((step + WHICH) % 2, segment.tiles, 2):
            at = step + tile
            wait_full(shared.k_full, at, SLOTS)
            q = shared.q.index(q_slot + (at >> 30)).permute((1, 0))
            scores = gl.zeros([KEYS, COLUMNS], gl.float32, SCORES)
            scores = warpgroup_mma(shared.k.index(at % SLOTS), q, scores, use_acc=False, is_async=True)
            scale = shared.k_scale.index(at % SLOTS).load(gl.SliceLayout(1, logits_layout(QUERIES)))
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(shared.k_empty.index(at % SLOTS), count=1)
            total = sum_over_heads(scores, weights, HEADS) * scale[:, None]
            # A scale is above 0. It is 0 where the page is not in the cache.
            total = gl.where(scale[:, None] == 0, float("-inf"), total)
            store(total, segment.key + tile * KEYS, rows)
        mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        segments_done += 1
        step += segment.tiles
        segment = split.next_segment(work, segment)


def index_logits_paged_kernel(
    q,
    weights,
    k,
    k_scale,
    pages: tl.int32,
    page_size: tl.int32,
    block_table,
    table_stride: tl.int64,
    table_columns: tl.int32,
    lengths,
    request_stride: tl.int64,
    token_stride: tl.int64,
    length_columns: tl.int32,
    shortened: tl.int32,
    most_keys: tl.int32,
    requests: tl.int32,
    next_n: tl.int32,
    logits,
    logits_stride: tl.int64,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOX: tl.constexpr,
):
    """All tiles of all requests, one after the other, in equal parts to the programs. Arguments as in ``launch``."""
    shared = Shared(
        gl.allocate_shared_memory(gl.float8e4nv, [Q_SLOTS, COLUMNS, HEAD_DIM], vectors_layout(HEAD_DIM)),
        gl.allocate_shared_memory(gl.float32, [Q_SLOTS, COLUMNS], numbers_layout()),
        barriers(Q_SLOTS, 1),
        barriers(Q_SLOTS, 2),
        gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, KEYS, HEAD_DIM], vectors_layout(HEAD_DIM)),
        gl.allocate_shared_memory(gl.float32, [SLOTS, KEYS], numbers_layout()),
        barriers(SLOTS, 1),
        barriers(SLOTS, 1),
    )
    work = split.Work(
        lengths,
        request_stride,
        token_stride,
        length_columns,
        shortened,
        most_keys,
        requests,
        next_n,
        COLUMNS // HEADS,
    )
    cache = Cache(k, k_scale, pages, page_size, block_table, table_stride, table_columns)
    segment = split.first_segment(work)
    gl.warp_specialize(
        [
            (produce, (Queries(q, weights), cache, work, segment, shared, BOX, HEADS)),
            (consume, (work, segment, shared, logits, logits_stride, 0, HEADS)),
            (consume, (work, segment, shared, logits, logits_stride, 1, HEADS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )


kernel = gluon_kernel(index_logits_paged_kernel, by_element=["block_table", "lengths", "logits"])
