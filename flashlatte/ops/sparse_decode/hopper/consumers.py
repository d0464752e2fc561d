"""The two consumers of sparse decode: queries, scores of a block of keys, the work items that a CTA works on, and
what it writes of each.

What happens between scores and output is ``mla_pipeline``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper import barriers, clusters
from flashlatte.kernels.hopper.mla_pipeline import (
    add_other_sum,
    attend_even,
    attend_odd,
    begin_odd,
    empty_state,
    release,
)
from flashlatte.kernels.hopper.mla_tiles import (
    HALF,
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    KEYS,
    LEFT,
    RIGHT,
    ROWS,
    SCORE_COLS,
    SCORES,
    half_of,
)
from flashlatte.kernels.hopper.neighbours import neighbours
from flashlatte.kernels.hopper.ptx import clusters as ptx_clusters
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.softmax import inverse, lse2_of
from flashlatte.kernels.triton.online_softmax import sink_weight
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.rows import Rows, copy_words, tokens_layout
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, OUTPUT, OUTPUT_ROWS, PLAIN
from flashlatte.split_kv import rounded_partials
from flashlatte.split_kv.gluon import PARTIAL, write_partial
from flashlatte.split_kv.outputs import head_pointers, write_lse


class Query(NamedTuple):
    """The queries, in the kernel a pointer to words; strides in units of 16 bytes."""

    q: Any
    q_stride_request: Any
    q_stride_token: Any
    q_stride_head: Any


class Call(NamedTuple):
    """What stays the same over all items of a CTA.

    Attributes:
        query: all queries (``Query``).
        own, extra: tokens of the cache and of the extra one (``rows.Selection``), None where there is none.
        key_lengths: of the items (``device.KeyLengths``).
        work: what the CTA works on (``schedule.Work``).
        scale: softmax_scale · log2(e).
        tiles, masks, full: shared memory.
        peer: the cluster with the peer CTA (``clusters.Cluster``), None where there is none.
        outputs: where results go (``outputs.Outputs``).
        scratch: all partial outputs, None where no work item is split; ``partials`` those of the CTA.
    """

    query: Any
    own: Any
    extra: Any
    key_lengths: Any
    work: Any
    scale: Any
    tiles: Any
    masks: Any
    full: Any
    peer: Any
    outputs: Any
    scratch: Any
    partials: Any


@gluon.jit
def copy_query(call, item, cost, PLAN: gl.constexpr):
    """Ask for the queries of an item that starts at ``cost``, if the CTA has something of it; 0 beyond the last head.

    The even consumer does: it has time when they are asked for.
    """
    if schedule.has_split(item, cost, call.work, PLAN):
        query = call.query
        tokens = call.key_lengths.tokens
        # Opaque: what follows from it would else be worked out before the main loop, and kept in registers.
        head = opaque(call.work.group * ROWS + gl.arange(0, ROWS, tokens_layout(False)))
        offset = (
            (item // tokens).to(gl.int64) * query.q_stride_request
            + (item % tokens).to(gl.int64) * query.q_stride_token
            + head.to(gl.int64) * query.q_stride_head
        )
        words = query.q + offset * 4
        exists = head < call.outputs.heads
        rows = Rows(words, exists, exists)
        copy_words(call.tiles.q.left, rows, 0, 0, 128, False)
        copy_words(call.tiles.q.right, rows, 128, 0, 128, False)
        if PLAN.has_rope:
            copy_words(call.tiles.q.rope, rows, 256, 0, 32, False)
        async_copy.mbarrier_arrive(call.full.q, increment_count=False)


@gluon.jit
def _begin(call, FIRST_EMPTY: gl.constexpr, SECOND_EMPTY: gl.constexpr, PLAN: gl.constexpr):
    if PLAN.cluster:
        ptx_clusters.arrive()
        ptx_clusters.meet()
    else:
        release(call, FIRST_EMPTY, PLAN.producer_threads)
        release(call, SECOND_EMPTY, PLAN.producer_threads)


@gluon.jit
def _score_half(
    call,
    k,
    full,
    phase,
    zero,
    scores,
    SIDE: gl.constexpr,
    FULL: gl.constexpr,
    USE_ACC: gl.constexpr,
    PLAN: gl.constexpr,
):
    """Scores [64, 64] with half of a block, once that is there. ``full``: the mbarriers of what comes by cp.async."""
    q_half, k_half, copied = half_of(call.tiles.q, SIDE).index(zero), half_of(k, SIDE).index(zero), half_of(full, SIDE)
    if SIDE == RIGHT and PLAN.format == MODEL1:
        # Its last 64 columns come by cp.async.
        mbarrier.wait(copied, phase)
    barriers.wait(FULL, 128 + PLAN.producer_threads)
    if PLAN.cluster:
        clusters.wait(FULL, call.peer, phase)
    if PLAN.format == PLAIN:
        mbarrier.wait(copied, phase)
    # The consumer's fence, not the producer's: it waits for all loads of its thread, and a consumer has none.
    fence_async_shared()
    return warpgroup_mma(q_half, k_half.permute((1, 0)), scores, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _score_rope(call, k, full, phase, zero, scores, PLAN: gl.constexpr):
    if PLAN.has_rope:
        q_rope, k_rope = call.tiles.q.rope.index(zero), k.rope.index(zero)
        if PLAN.format != PLAIN:
            mbarrier.wait(full.right, phase)
            fence_async_shared()
        scores = warpgroup_mma(q_rope, k_rope.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def score0(call, phase, zero, PLAN: gl.constexpr):
    """Masked scores of block 0, which begins with its left half: that is empty first."""
    k, full = call.tiles.k0, call.full.k0
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _score_half(call, k, full, phase, zero, scores, LEFT, tiles.K0_LEFT_FULL, False, PLAN)
    scores = _score_half(call, k, full, phase, zero, scores, RIGHT, tiles.K0_RIGHT_FULL, True, PLAN)
    scores = _score_rope(call, k, full, phase, zero, scores, PLAN)
    return apply_mask(warpgroup_mma_wait(0, deps=[scores]), call.masks.block0)


@gluon.jit
def _begin_score1(call, phase, zero, PLAN: gl.constexpr):
    """Scores of block 1, under way; it begins with its right half."""
    k, full = call.tiles.k1, call.full.k1
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _score_half(call, k, full, phase, zero, scores, RIGHT, tiles.K1_RIGHT_FULL, False, PLAN)
    scores = _score_half(call, k, full, phase, zero, scores, LEFT, tiles.K1_LEFT_FULL, True, PLAN)
    return _score_rope(call, k, full, phase, zero, scores, PLAN)


@gluon.jit
def apply_mask(scores, mask):
    selected = mask.load(SCORE_COLS) != 0
    return gl.where(selected[None, :], scores, float("-inf"))


@gluon.jit
def write(state, item, split, call, FIRST_COL: gl.constexpr, PLAN: gl.constexpr):
    """Write columns from FIRST_COL of a work item's heads, as its result or as a partial output; those from 0 bring the
    lse along."""
    first_head = call.work.group * ROWS
    if PLAN.equal_splits:
        rows_in_use = call.outputs.heads - first_head
        rounded_partials.write(state.out, state.row_max, state.row_sum, call.partials, rows_in_use, FIRST_COL)
    else:
        _write_normalised(state, item, split, first_head, call, FIRST_COL, PLAN.out_align)


@gluon.jit
def _write_normalised(state, item, split, first_head, call, FIRST_COL: gl.constexpr, OUT_ALIGN: gl.constexpr):
    outputs = call.outputs
    row_sum = gl.convert_layout(state.row_sum, OUTPUT_ROWS, assert_trivial=True)
    row_max = gl.convert_layout(state.row_max, OUTPUT_ROWS, assert_trivial=True)
    factor = inverse(row_sum)
    lse2 = lse2_of(row_max, row_sum)
    # Opaque, as in ``copy_query``.
    row = opaque(gl.arange(0, ROWS, OUTPUT_ROWS))
    head = first_head + row
    if (split.begin == 0) & (split.end == split.blocks):
        if outputs.sink is not None:
            factor *= sink_weight(outputs.sink, outputs.sink_stride, head, head < outputs.heads, lse2, row_sum == 0)
        _write_out(outputs, item, first_head, state.out * factor[:, None], FIRST_COL, OUT_ALIGN)
        if FIRST_COL == 0:
            write_lse(outputs, item, 0, head, lse2)
    elif call.partials is not None:
        # A range's first partial output is of an item begun before it, the second one of an item that it begins.
        partial = call.partials + gl.where(split.begin > 0, 0, PARTIAL)
        write_partial(partial, row, head < outputs.heads, state.out * factor[:, None], lse2, FIRST_COL)


@gluon.jit
def _write_out(outputs, item, first_head, values, FIRST_COL: gl.constexpr, OUT_ALIGN: gl.constexpr):
    values = neighbours(values.to(outputs.out.dtype.element_ty))
    LAYOUT: gl.constexpr = values.type.layout
    head = first_head + opaque(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))
    col = FIRST_COL + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    pointers = head_pointers(outputs, item, head, OUT_ALIGN)[:, None] + col[None, :]
    gl.store(pointers, values, mask=(head < outputs.heads)[:, None])


@gluon.jit
def consume_even(call, PLAN: gl.constexpr):
    _begin(call, K0_LEFT_EMPTY, K1_LEFT_EMPTY, PLAN)
    cta_range = call.work.range
    copy_query(call, cta_range.first, cta_range.first_cost, PLAN)
    cost = cta_range.first_cost
    items_taken = 0
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop, call.work.stride):
        split = schedule.split_of(item, cost, call.work, call.key_lengths, PLAN)
        cost += PLAN.overhead + split.blocks
        steps = schedule.num_steps(split)
        if steps > 0:
            state = empty_state(OUTPUT)
            mbarrier.wait(call.full.q, items_taken & 1)
            for _ in range(steps):
                zero = steps_taken >> 30
                scores = score0(call, steps_taken & 1, zero, PLAN)
                state = attend_even(scores, state, call, zero, PLAN.producer_threads, True)
                steps_taken += 1
            items_taken += 1
            # The present queries may be overwritten: the odd consumer, whose last P has come, is done with them, too.
            copy_query(call, item + call.work.stride, cost, PLAN)
            state = add_other_sum(state, call.tiles.row_sum0, call.tiles.row_sum1)
            write(state, item, split, call, 0, PLAN)


@gluon.jit
def consume_odd(call, PLAN: gl.constexpr):
    _begin(call, K0_RIGHT_EMPTY, K1_RIGHT_EMPTY, PLAN)
    cta_range = call.work.range
    cost = cta_range.first_cost
    items_taken = 0
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop, call.work.stride):
        split = schedule.split_of(item, cost, call.work, call.key_lengths, PLAN)
        cost += PLAN.overhead + split.blocks
        steps = schedule.num_steps(split)
        if steps > 0:
            state = empty_state(OUTPUT)
            mbarrier.wait(call.full.q, items_taken & 1)
            for _ in range(steps):
                zero = steps_taken >> 30
                scores = _begin_score1(call, steps_taken & 1, zero, PLAN)
                out, row_max0 = begin_odd(state, call, zero)
                scores = apply_mask(warpgroup_mma_wait(1, deps=[scores]), call.masks.block1)
                state = attend_odd(scores, out, row_max0, state, call, zero, PLAN.producer_threads, True)
                steps_taken += 1
            items_taken += 1
            state = add_other_sum(state, call.tiles.row_sum1, call.tiles.row_sum0)
            write(state, item, split, call, HALF, PLAN)
