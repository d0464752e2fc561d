"""Logits of many queries against keys that stand in a row: docs/kernels/index-logits.md explains the schedule."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.ops.index_logits.hopper.scores import Rows, logits_layout, store, sum_over_heads
from flashlatte.ops.index_logits.hopper.tiles import (
    CONSUMER_REGISTERS,
    KEYS,
    PRODUCER_REGISTERS,
    barriers,
    numbers_layout,
    scores_layout,
    vectors_layout,
    wait_empty,
    wait_full,
)
from flashlatte.runtime.gluon_compat import tma_load
from flashlatte.runtime.triton_kernel import gluon_kernel

# Slots of the ring of keys, and of the ring of queries.
SLOTS = gl.constexpr(8)
Q_SLOTS = gl.constexpr(2)
# A consumer's columns, the heads of its queries, of which a WGMMA takes one half.
COLUMNS = gl.constexpr(256)
HALF_COLUMNS = gl.constexpr(128)


class Problem(NamedTuple):
    """The queries, the keys that each sees, how many keys a work item covers (a multiple of 64), and turns of work."""

    key_start: Any
    start_stride: Any
    key_end: Any
    end_stride: Any
    num_queries: Any
    num_keys: Any
    item_keys: Any
    num_turns: Any


class Inputs(NamedTuple):
    """TMA descriptors: q [M · H, D] and weights [M · H] by 256, k [N, D] and k_scale [N] by 64."""

    q: Any
    weights: Any
    k: Any
    k_scale: Any


class Output(NamedTuple):
    """Logits [M, width], the stride of a row, and whether a row begins with its first seen key (1) or key 0 (0)."""

    logits: Any
    stride: Any
    width: Any
    compressed: Any


class Shared(NamedTuple):
    """Rings of queries, a slot of which has both consumers', and of keys."""

    q: Any  # [2 * Q_SLOTS, 256, D]
    weights: Any  # [2 * Q_SLOTS, 256]
    q_full: Any
    q_empty: Any
    k: Any  # [SLOTS, 64, D]
    k_scale: Any  # [SLOTS, 64]
    k_full: Any
    k_empty: Any


class Item(NamedTuple):
    """Queries from ``query`` on, and ``tiles`` tiles of keys from ``key`` on that hold what any of them sees."""

    query: Any
    key: Any
    tiles: Any


@gluon.jit
def _range(problem, query):
    """The first key that each query sees and the end, within the keys; an empty range for what is no query."""
    is_query = query < problem.num_queries
    row = query.to(gl.int64)
    start = gl.load(problem.key_start + row * problem.start_stride, mask=is_query, other=0)
    end = gl.load(problem.key_end + row * problem.end_stride, mask=is_query, other=0)
    start = gl.minimum(gl.maximum(start, 0), problem.num_keys).to(gl.int32)
    end = gl.minimum(gl.maximum(end, 0), problem.num_keys).to(gl.int32)
    return start, end


@gluon.jit
def _item(problem, turn, QUERIES: gl.constexpr):
    """What the program works on in a turn.

    In the list of items all queries take the first keys, then the next, so that the keys at work at one time fit the L2
    cache; and the last queries come first, so that with a causal mask the short items come last. Programs take them in
    order in one turn and in reverse in the next, so that who had a longer one gets a shorter one.
    """
    program = gl.where(turn % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))
    number = turn * gl.num_programs(0) + program
    num_blocks = (problem.num_queries + QUERIES - 1) // QUERIES
    query = (num_blocks - 1 - number % num_blocks) * QUERIES
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    start, end = _range(problem, query + gl.arange(0, QUERIES, LAYOUT))
    item_start = number // num_blocks * problem.item_keys
    first = gl.maximum(gl.min(gl.where(start < end, start, problem.num_keys), 0), item_start) // KEYS * KEYS
    last = gl.minimum(gl.max(end, 0), item_start + problem.item_keys)
    return Item(query, first, gl.maximum(last - first + KEYS - 1, 0) // KEYS)


@gluon.jit
def produce(inputs, problem, shared, HEADS: gl.constexpr):
    """Fill the rings, for both consumers."""
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    items_done = 0
    step = 0
    for turn in range(problem.num_turns):
        item = _item(problem, turn, 2 * COLUMNS // HEADS)
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
def _rows(problem, output, first_query, QUERIES: gl.constexpr):
    query = first_query + gl.arange(0, QUERIES, gl.SliceLayout(0, logits_layout(QUERIES)))
    start, end = _range(problem, query)
    first = start * output.compressed
    end = gl.minimum(end, first + output.width)
    return Rows(start, end, output.logits + (query.to(gl.int64) * output.stride - first))


@gluon.jit
def _start_scores(shared, q_slot, step, HALF: gl.constexpr):
    """Start keys · queries of one half of a consumer's columns: [64, 128]."""
    # An index that is not constant in the loop: the compiler would keep the descriptors, and spill.
    q = shared.q.index(q_slot + (step >> 30)).slice(HALF * HALF_COLUMNS, HALF_COLUMNS).permute((1, 0))
    scores = gl.zeros([KEYS, HALF_COLUMNS], gl.float32, scores_layout(HALF_COLUMNS))
    return warpgroup_mma(shared.k.index(step % SLOTS), q, scores, use_acc=False, is_async=True)


@gluon.jit
def _weights(shared, q_slot, HALF: gl.constexpr):
    half = shared.weights.index(q_slot).slice(HALF * HALF_COLUMNS, HALF_COLUMNS)
    return half.load(gl.SliceLayout(0, scores_layout(HALF_COLUMNS)))


@gluon.jit
def consume(problem, shared, output, WHICH: gl.constexpr, HEADS: gl.constexpr):
    """The logits of one half of an item's queries, of two halves in turn: one is reduced while the other multiplies."""
    QUERIES: gl.constexpr = HALF_COLUMNS // HEADS
    items_done = 0
    step = 0
    for turn in range(problem.num_turns):
        item = _item(problem, turn, 4 * QUERIES)
        if item.tiles > 0:
            query = item.query + 2 * WHICH * QUERIES
            rows_0 = _rows(problem, output, query, QUERIES)
            rows_1 = _rows(problem, output, query + QUERIES, QUERIES)
            wait_full(shared.q_full, items_done, Q_SLOTS)
            q_slot = items_done % Q_SLOTS * 2 + WHICH
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


def index_logits_ragged_kernel(
    q,
    weights,
    k,
    k_scale,
    key_start,
    start_stride: tl.int64,
    key_end,
    end_stride: tl.int64,
    num_queries: tl.int32,
    num_keys: tl.int32,
    item_keys: tl.int32,
    num_turns: tl.int32,
    logits,
    logits_stride: tl.int64,
    width: tl.int32,
    compressed: tl.int32,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """In each turn a program takes a work item: 512 / HEADS queries and up to item_keys keys."""
    shared = Shared(
        gl.allocate_shared_memory(gl.float8e4nv, [2 * Q_SLOTS, COLUMNS, HEAD_DIM], vectors_layout(HEAD_DIM)),
        gl.allocate_shared_memory(gl.float32, [2 * Q_SLOTS, COLUMNS], numbers_layout()),
        barriers(Q_SLOTS, 1),
        barriers(Q_SLOTS, 2),
        gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, KEYS, HEAD_DIM], vectors_layout(HEAD_DIM)),
        gl.allocate_shared_memory(gl.float32, [SLOTS, KEYS], numbers_layout()),
        barriers(SLOTS, 1),
        barriers(SLOTS, 2),
    )
    problem = Problem(key_start, start_stride, key_end, end_stride, num_queries, num_keys, item_keys, num_turns)
    inputs = Inputs(q, weights, k, k_scale)
    output = Output(logits, logits_stride, width, compressed)
    gl.warp_specialize(
        [
            (consume, (problem, shared, output, 0, HEADS)),
            (consume, (problem, shared, output, 1, HEADS)),
            (produce, (inputs, problem, shared, HEADS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


kernel = gluon_kernel(index_logits_ragged_kernel, by_element=["key_start", "key_end", "logits"])
