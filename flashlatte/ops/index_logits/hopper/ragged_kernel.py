"""Logits of many queries against keys that stand in a row: docs/kernels/index-logits.md explains the schedule."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.ops.index_logits.hopper.ragged_split import (
    Problem,
    first_segment,
    key_range,
    next_segment,
    of_launch,
)
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

# Of the ring of keys, and of the ring of queries.
SLOTS = gl.constexpr(8)
Q_SLOTS = gl.constexpr(2)
# A consumer's columns, the heads of its queries, of which a WGMMA takes one half.
COLUMNS = gl.constexpr(256)
HALF_COLUMNS = gl.constexpr(128)


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


@gluon.jit
def produce(inputs, problem, segment, shared, HEADS: gl.constexpr):
    """Fill the rings, for both consumers."""
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    segments_done = 0
    step = 0
    while segment.tiles > 0:
        wait_empty(shared.q_empty, segments_done, Q_SLOTS)
        full = shared.q_full.index(segments_done % Q_SLOTS)
        mbarrier.expect(full, 2 * COLUMNS * (HEAD_DIM + 4))
        for which in gl.static_range(2):
            slot = segments_done % Q_SLOTS * 2 + which
            row = segment.block * (2 * COLUMNS) + which * COLUMNS
            tma_load(inputs.q, [row, 0], full, shared.q.index(slot))
            tma_load(inputs.weights, [row], full, shared.weights.index(slot))
        segments_done += 1
        for tile in range(segment.tiles):
            wait_empty(shared.k_empty, step, SLOTS)
            slot = step % SLOTS
            full = shared.k_full.index(slot)
            mbarrier.expect(full, KEYS * (HEAD_DIM + 4))
            tma_load(inputs.k, [segment.key + tile * KEYS, 0], full, shared.k.index(slot))
            tma_load(inputs.k_scale, [segment.key + tile * KEYS], full, shared.k_scale.index(slot))
            step += 1
        segment = next_segment(problem, segment, 2 * COLUMNS // HEADS)


@gluon.jit
def _rows(problem, output, first_query, QUERIES: gl.constexpr):
    query = first_query + gl.arange(0, QUERIES, gl.SliceLayout(0, logits_layout(QUERIES)))
    start, end = key_range(problem, query)
    first = start * output.compressed
    start, end = of_launch(problem, start, gl.minimum(end, first + output.width))
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
def consume(problem, segment, shared, output, WHICH: gl.constexpr, HEADS: gl.constexpr):
    """The logits of one half of a block's queries, of two halves in turn: one is reduced while the other multiplies."""
    QUERIES: gl.constexpr = HALF_COLUMNS // HEADS
    segments_done = 0
    step = 0
    while segment.tiles > 0:
        query = (4 * segment.block + 2 * WHICH) * QUERIES
        rows_0 = _rows(problem, output, query, QUERIES)
        rows_1 = _rows(problem, output, query + QUERIES, QUERIES)
        wait_full(shared.q_full, segments_done, Q_SLOTS)
        q_slot = segments_done % Q_SLOTS * 2 + WHICH
        weights_0 = _weights(shared, q_slot, 0)
        weights_1 = _weights(shared, q_slot, 1)
        for tile in range(segment.tiles):
            key = segment.key + tile * KEYS
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
        mbarrier.arrive(shared.q_empty.index(segments_done % Q_SLOTS), count=1)
        segments_done += 1
        segment = next_segment(problem, segment, 4 * QUERIES)


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
    first_key: tl.int32,
    last_key: tl.int32,
    logits,
    logits_stride: tl.int64,
    width: tl.int32,
    compressed: tl.int32,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """All tiles of all blocks of 512 / HEADS queries, in equal parts to the programs. Arguments as in ``launch``."""
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
    problem = Problem(key_start, start_stride, key_end, end_stride, num_queries, num_keys, first_key, last_key)
    segment = first_segment(problem, 2 * COLUMNS // HEADS)
    inputs = Inputs(q, weights, k, k_scale)
    output = Output(logits, logits_stride, width, compressed)
    gl.warp_specialize(
        [
            (consume, (problem, segment, shared, output, 0, HEADS)),
            (consume, (problem, segment, shared, output, 1, HEADS)),
            (produce, (inputs, problem, segment, shared, HEADS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


kernel = gluon_kernel(index_logits_ragged_kernel, by_element=["key_start", "key_end", "logits"])
