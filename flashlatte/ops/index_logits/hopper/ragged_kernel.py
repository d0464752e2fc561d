"""Logits of many queries with contiguous keys; docs/kernels/index-logits.md explains the schedule."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.ops.index_logits.hopper.scores import LogitsOutput, logits_layout, store, sum_over_heads
from flashlatte.ops.index_logits.hopper.tiles import (
    KEYS,
    allocate_rings,
    initialize_rings,
    scores_layout,
    wait_empty,
    wait_full,
)
from flashlatte.ops.index_logits.key_ranges import KeyRanges, LogitRows
from flashlatte.runtime.gluon_compat import tma_load
from flashlatte.runtime.kernel_records import Int32, Pointer
from flashlatte.runtime.triton_kernel import gluon_kernel

# Slots of the ring of keys, and of the ring of queries; a slot holds the queries of both consumers.
SLOTS = gl.constexpr(8)
Q_SLOTS = gl.constexpr(2)
# Columns of a consumer (heads of its queries), and of a WGMMA: half of them.
COLUMNS = gl.constexpr(256)
HALF_COLUMNS = gl.constexpr(128)
# Registers per thread of a consumer, and of the producer, whose single warp counts as four.
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


class RaggedLogitsWork(NamedTuple):
    """The queries, their ranges of visible keys, the keys per work item (a multiple of 64), and the number of waves of
    work items."""

    ranges: KeyRanges
    num_queries: Int32
    num_keys: Int32
    item_keys: Int32
    num_waves: Int32


class RaggedLogitsInputs(NamedTuple):
    """TMA descriptors: q [M · H, D] and weights [M · H] in boxes of 256, k [N, D] and k_scale [N] in boxes of 64."""

    q: Pointer
    weights: Pointer
    k: Pointer
    k_scale: Pointer


class RaggedLogitsItem(NamedTuple):
    """A work item: queries from ``query`` on, and ``tiles`` tiles of keys from ``key`` on, which include all visible
    keys of the item."""

    query: Any
    key: Any
    tiles: Any


@gluon.jit
def _range(work, query):
    """Begin and end of the visible keys of each query, clamped to the keys; an empty range after the last query."""
    is_query = query < work.num_queries
    row = query.to(gl.int64)
    start = gl.load(work.ranges.start + row * work.ranges.start_stride, mask=is_query, other=0)
    end = gl.load(work.ranges.end + row * work.ranges.end_stride, mask=is_query, other=0)
    start = gl.minimum(gl.maximum(start, 0), work.num_keys).to(gl.int32)
    end = gl.minimum(gl.maximum(end, 0), work.num_keys).to(gl.int32)
    return start, end


@gluon.jit
def _item(work, wave, QUERIES: gl.constexpr):
    """The program's work item of a wave.

    The list of items iterates over queries inside of keys, so that the keys in use at a time fit in L2, and begins with
    the last queries, so that with a causal mask short items come last. Programs take items in order in one wave and in
    reverse order in the next, so that a program with a longer item then gets a shorter one.
    """
    program = gl.where(wave % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))
    index = wave * gl.num_programs(0) + program
    num_blocks = (work.num_queries + QUERIES - 1) // QUERIES
    query = (num_blocks - 1 - index % num_blocks) * QUERIES
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    start, end = _range(work, query + gl.arange(0, QUERIES, LAYOUT))
    item_start = index // num_blocks * work.item_keys
    first = gl.maximum(gl.min(gl.where(start < end, start, work.num_keys), 0), item_start) // KEYS * KEYS
    last = gl.minimum(gl.max(end, 0), item_start + work.item_keys)
    return RaggedLogitsItem(query, first, gl.maximum(last - first + KEYS - 1, 0) // KEYS)


@gluon.jit
def produce(inputs, work, shared, HEADS: gl.constexpr):
    """Fill the rings of both consumers."""
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    items_done = 0
    step = 0
    for wave in range(work.num_waves):
        item = _item(work, wave, 2 * COLUMNS // HEADS)
        if item.tiles > 0:
            wait_empty(shared.q_empty, items_done, Q_SLOTS)
            full = shared.q_full.index(items_done % Q_SLOTS)
            mbarrier.expect(full, 2 * COLUMNS * (HEAD_DIM + 4))
            for which in gl.static_range(2):
                slot = items_done % Q_SLOTS * 2 + which
                row = item.query * HEADS + which * COLUMNS
                tma_load(inputs.q, [row, 0], full, shared.q.index(slot))
                tma_load(inputs.weights, [row], full, shared.weights.index(slot))
            items_done += 1
        for tile in range(item.tiles):
            wait_empty(shared.k_empty, step, SLOTS)
            slot = step % SLOTS
            full = shared.k_full.index(slot)
            mbarrier.expect(full, KEYS * (HEAD_DIM + 4))
            tma_load(inputs.k, [item.key + tile * KEYS, 0], full, shared.k.index(slot))
            tma_load(inputs.k_scale, [item.key + tile * KEYS], full, shared.k_scale.index(slot))
            step += 1


@gluon.jit
def _rows(work, output, first_query, QUERIES: gl.constexpr):
    query = first_query + gl.arange(0, QUERIES, gl.SliceLayout(0, logits_layout(QUERIES)))
    start, end = _range(work, query)
    first = start * output.compressed
    end = gl.minimum(end, first + output.width)
    return LogitRows(start, end, output.logits + (query.to(gl.int64) * output.stride - first))


@gluon.jit
def _start_scores(shared, q_slot, step, HALF: gl.constexpr):
    """Start keys · queries for half of a consumer's columns: [64, 128]."""
    # The index must vary in the loop: otherwise the compiler keeps the matrix descriptors in registers, and spills.
    q = shared.q.index(q_slot + (step >> 30)).slice(HALF * HALF_COLUMNS, HALF_COLUMNS).permute((1, 0))
    scores = gl.zeros([KEYS, HALF_COLUMNS], gl.float32, scores_layout(HALF_COLUMNS))
    return warpgroup_mma(shared.k.index(step % SLOTS), q, scores, use_acc=False, is_async=True)


@gluon.jit
def _weights(shared, q_slot, HALF: gl.constexpr):
    half = shared.weights.index(q_slot).slice(HALF * HALF_COLUMNS, HALF_COLUMNS)
    return half.load(gl.SliceLayout(0, scores_layout(HALF_COLUMNS)))


@gluon.jit
def consume(work, shared, output, CONSUMER: gl.constexpr, HEADS: gl.constexpr):
    """Compute the logits of half of an item's queries, in two halves that alternate: one is reduced while the other is
    multiplied."""
    QUERIES: gl.constexpr = HALF_COLUMNS // HEADS
    items_done = 0
    step = 0
    for wave in range(work.num_waves):
        item = _item(work, wave, 4 * QUERIES)
        if item.tiles > 0:
            query = item.query + 2 * CONSUMER * QUERIES
            rows_0 = _rows(work, output, query, QUERIES)
            rows_1 = _rows(work, output, query + QUERIES, QUERIES)
            wait_full(shared.q_full, items_done, Q_SLOTS)
            q_slot = items_done % Q_SLOTS * 2 + CONSUMER
            weights_0 = _weights(shared, q_slot, 0)
            weights_1 = _weights(shared, q_slot, 1)
            for tile in range(item.tiles):
                key = item.key + tile * KEYS
                wait_full(shared.k_full, step, SLOTS)
                scores_0 = _start_scores(shared, q_slot, step, 0)
                scores_1 = _start_scores(shared, q_slot, step, 1)
                scale = shared.k_scale.index(step % SLOTS).load(gl.SliceLayout(1, logits_layout(QUERIES)))[:, None]
                scores_0 = warpgroup_mma_wait(1, deps=[scores_0])
                store(sum_over_heads(scores_0, weights_0, HEADS) * scale, key, rows_0)
                scores_1 = warpgroup_mma_wait(0, deps=[scores_1])
                mbarrier.arrive(shared.k_empty.index(step % SLOTS), count=1)
                store(sum_over_heads(scores_1, weights_1, HEADS) * scale, key, rows_1)
                step += 1
            mbarrier.arrive(shared.q_empty.index(items_done % Q_SLOTS), count=1)
            items_done += 1


@gluon_kernel
def index_logits_ragged_kernel(
    inputs: RaggedLogitsInputs,
    work: RaggedLogitsWork,
    output: LogitsOutput,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """In each wave a program processes one work item: 512 / HEADS queries and up to item_keys keys."""
    shared = allocate_rings(Q_SLOTS, 2, COLUMNS, COLUMNS, SLOTS, 1, HEAD_DIM)
    initialize_rings(shared, 1)
    gl.warp_specialize(
        [
            (consume, (work, shared, output, 0, HEADS)),
            (consume, (work, shared, output, 1, HEADS)),
            (produce, (inputs, work, shared, HEADS)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )
