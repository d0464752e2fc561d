"""The two consumers of dense decode: scores of a block of keys, its mask, and the requests that a CTA works on.

What happens between scores and output is ``mla_pipeline``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_pipeline import add_other_sum, attend_even, attend_odd, begin_odd, empty_state
from flashlatte.kernels.hopper.mla_tiles import (
    COPY,
    HALF,
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    KEYS,
    OUTPUT,
    Q_OPERAND,
    ROWS,
    SCORE_COLS,
    SCORE_ROWS,
    SCORES,
)
from flashlatte.kernels.hopper.ptx.threads import lanes_below_zero
from flashlatte.ops.dense_decode.hopper import epilogue, schedule
from flashlatte.ops.dense_decode.hopper.tiles import PAIR, Q_EMPTY, Q_ROPE_EMPTY
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.split_kv import device

# Threads of the producer.
_PRODUCER = gl.constexpr(128)


class Call(NamedTuple):
    """What stays the same over all requests of a CTA.

    Attributes:
        query: all queries (``producer.Query``); ``corner`` where the CTA's rows begin (``producer.Corner``).
        keys: of the producer (``producer.Keys`` or ``one_byte_producer.Keys``).
        key_lengths: of the requests (``device.KeyLengths``).
        table: their pages (``schedule.Table``).
        work: what the CTA works on (``schedule.Work``).
        causal_offset: keys at a request's end that its first query token does not see: s_q - 1 if causal, else 0.
        scale: softmax_scale · log2(e).
        tiles, full: shared memory.
        peer: None, for ``mla_pipeline``.
        results: where results go (``epilogue.Results``).
    """

    query: Any
    corner: Any
    keys: Any
    key_lengths: Any
    table: Any
    work: Any
    causal_offset: Any
    scale: Any
    tiles: Any
    full: Any
    peer: Any
    results: Any


class Mask(NamedTuple):
    """Which keys the rows of a request see.

    Attributes:
        length: keys of the request.
        seen_by_all: keys that every row of the tile sees, if their pages are in the cache.
        seen: [64], keys that each row sees.
    """

    length: Any
    seen_by_all: Any
    seen: Any


class Request(NamedTuple):
    """The request at hand: what the CTA has of it (``schedule.Split``), which keys are seen (``Mask``), and the
    rope of its queries in registers (without rope: anything)."""

    split: Any
    mask: Any
    q_rope: Any


@gluon.jit
def _mask_of(length, call):
    """The mask of a request with ``length`` keys."""
    token = (call.work.group.first_row + gl.arange(0, ROWS, SCORE_ROWS)) // call.query.heads
    seen_by_all = length - call.causal_offset
    return Mask(length, seen_by_all, gl.minimum(seen_by_all + token, length))


@gluon.jit
def _apply_mask(scores, mask, page, first_key, left, right, PLAN: gl.constexpr):
    """Scores [64, 64] of the block at ``first_key``, -inf where a row does not see the key. ``page``: its page or, of
    each box, pages, as ``schedule.page_of`` has them.

    What lies in the cache beyond a request's end may be NaN, which P of zero would not hide: it is zeroed.
    """
    BOX: gl.constexpr = PLAN.box
    absent = page < 0
    if BOX < KEYS:
        absent_boxes = lanes_below_zero(page)
        absent = absent_boxes != 0
    if (first_key + KEYS > mask.seen_by_all) | absent:
        key = first_key + gl.arange(0, KEYS, SCORE_COLS)
        seen = mask.seen
        if BOX < KEYS:
            box = gl.arange(0, KEYS, SCORE_COLS) // BOX
            key = gl.where((absent_boxes >> box) & 1 == 0, key, 2**31 - 1)
        else:
            seen = gl.where(absent, 0, seen)
        scores = gl.where(key[None, :] < seen[:, None], scores, float("-inf"))
        # A producer that casts keys has stored zeros there.
        if not PLAN.one_byte:  # noqa: SIM102
            if first_key + KEYS > mask.length:
                _zero_rows(left, mask.length - first_key)
                _zero_rows(right, mask.length - first_key)
                fence_async_shared()
                cta_barrier()
    return scores


@gluon.jit
def _zero_rows(tile, first):
    """Zero the rows of a tile [64, 256] from row ``first`` on."""
    row = gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    for col in gl.static_range(0, 256, 64):
        part = tile.slice(col, 64, dim=1)  # [64, 64]
        values = part.load(COPY)
        part.store(gl.where((row < first)[:, None], values, 0.0).to(values.dtype))


@gluon.jit
def _begin_scores(call, request, k, full, phase, zero, scores, PLAN: gl.constexpr):
    """Scores [64, 64] of a block, under way: of each half as soon as it has come. ``scores``: registers for the result.

    The left half comes first, as the even consumer lets go of it before the odd one is done with the right.
    """
    q = call.tiles.q
    q_left, k_left = q.left.index(zero), k.left.index(zero)
    mbarrier.wait(full.left, phase)
    if PLAN.one_byte:
        fence_async_shared()
    scores = warpgroup_mma(q_left, k_left.permute((1, 0)), scores, use_acc=False, is_async=True)
    q_right, k_right, k_rope = q.right.index(zero), k.right.index(zero), k.rope.index(zero)
    mbarrier.wait(full.right, phase)
    if PLAN.one_byte:
        fence_async_shared()
    scores = warpgroup_mma(q_right, k_right.permute((1, 0)), scores, is_async=True)
    if PLAN.has_rope:
        q_rope = request.q_rope
        if PLAN.one_byte:
            q_rope = q.rope.index(zero)
        scores = warpgroup_mma(q_rope, k_rope.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _score0(call, request, page, block, phase, zero, scores, PLAN: gl.constexpr):
    """Scores of block 0, and its page, if that was not asked for ahead: their fences would have waited for it."""
    scores = _begin_scores(call, request, call.tiles.k0, call.full.k0, phase, zero, scores, PLAN)
    if PLAN.one_byte:
        page = schedule.page_of(call.table, request.split, block, PLAN)
    return warpgroup_mma_wait(0, deps=[scores]), page


@gluon.jit
def _take_queries(call, split, mask, phase, PLAN: gl.constexpr):
    """A request whose queries have come, with their rope in registers (``tiles.allocate``)."""
    mbarrier.wait(call.full.q, phase)
    if PLAN.has_rope and not PLAN.one_byte:
        return Request(split, mask, call.tiles.q.rope.index(0).load(Q_OPERAND))
    else:
        return Request(split, mask, call.tiles.q.rope)


@gluon.jit
def _even_step(scores, state, call, request, page, step, steps_taken, PLAN: gl.constexpr, LAST: gl.constexpr):
    """From the scores of block 0 to those of the next step's block 0 and its page, unless this step is the last."""
    k0 = call.tiles.k0
    phase, zero = steps_taken & 1, steps_taken >> 30
    left, right = k0.left.index(zero), k0.right.index(zero)
    scores = _apply_mask(scores, request.mask, page, step * PAIR, left, right, PLAN)
    state = attend_even(scores, state, call, zero, _PRODUCER, PLAN.one_byte)
    if not LAST:
        if not PLAN.one_byte:
            # Read no earlier: the fences of the step would have waited for it.
            page = schedule.page_of(call.table, request.split, 2 * step + 2, PLAN)
        scores, page = _score0(call, request, page, 2 * step + 2, phase ^ 1, zero, scores, PLAN)
    return scores, page, state


@gluon.jit
def _odd_step(state, call, request, page, step, steps_taken, PLAN: gl.constexpr, LAST: gl.constexpr):
    """A whole step, and the page of the next one, unless this is the last."""
    k1 = call.tiles.k1
    phase, zero = steps_taken & 1, steps_taken >> 30
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _begin_scores(call, request, k1, call.full.k1, phase, zero, scores, PLAN)
    if PLAN.one_byte:
        page = schedule.page_of(call.table, request.split, 2 * step + 1, PLAN)
    out, row_max0 = begin_odd(state, call, zero)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if LAST:
        barriers.arrive(Q_EMPTY, barriers.ALL)
    first_key = step * PAIR + KEYS
    scores = _apply_mask(scores, request.mask, page, first_key, k1.left.index(zero), k1.right.index(zero), PLAN)
    state = attend_odd(scores, out, row_max0, state, call, zero, _PRODUCER, PLAN.one_byte)
    if not LAST and not PLAN.one_byte:
        page = schedule.page_of(call.table, request.split, 2 * step + 3, PLAN)
    return page, state


@gluon.jit
def consume_even(call, PLAN: gl.constexpr):
    barriers.arrive(Q_EMPTY, barriers.ALL)
    barriers.arrive(K0_LEFT_EMPTY, barriers.PAIR)
    barriers.arrive(K1_LEFT_EMPTY, barriers.PAIR)
    tiles = call.tiles
    cta_range = call.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, call.key_lengths)
    items_taken = 0
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, call.work, PLAN)
        mask = _mask_of(length, call)
        cost += PLAN.overhead + split.steps
        length = device.key_count(item + 1, call.key_lengths)
        begin, end = split.begin, split.end
        if end > begin:
            page = schedule.page_of(call.table, split, 2 * begin, PLAN)
            state = empty_state(OUTPUT)
            scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
            phase, zero = steps_taken & 1, steps_taken >> 30
            request = _take_queries(call, split, mask, items_taken & 1, PLAN)
            scores, page = _score0(call, request, page, 2 * begin, phase, zero, scores, PLAN)
            if PLAN.has_rope and not PLAN.one_byte:
                barriers.wait(Q_ROPE_EMPTY, barriers.PAIR)
            for step in range(begin, end - 1):
                scores, page, state = _even_step(scores, state, call, request, page, step, steps_taken, PLAN, False)
                steps_taken += 1
            barriers.arrive(Q_EMPTY, barriers.ALL)
            scores, page, state = _even_step(scores, state, call, request, page, end - 1, steps_taken, PLAN, True)
            steps_taken += 1
            items_taken += 1
            state = add_other_sum(state, tiles.row_sum0, tiles.row_sum1)
            epilogue.write(state, split, call, 0, PLAN)


@gluon.jit
def consume_odd(call, PLAN: gl.constexpr):
    barriers.arrive(Q_EMPTY, barriers.ALL)
    barriers.arrive(K0_RIGHT_EMPTY, barriers.PAIR)
    barriers.arrive(K1_RIGHT_EMPTY, barriers.PAIR)
    tiles = call.tiles
    cta_range = call.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, call.key_lengths)
    items_taken = 0
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, call.work, PLAN)
        mask = _mask_of(length, call)
        cost += PLAN.overhead + split.steps
        length = device.key_count(item + 1, call.key_lengths)
        begin, end = split.begin, split.end
        if end > begin:
            page = schedule.page_of(call.table, split, 2 * begin + 1, PLAN)
            state = empty_state(OUTPUT)
            request = _take_queries(call, split, mask, items_taken & 1, PLAN)
            if PLAN.has_rope and not PLAN.one_byte:
                barriers.arrive(Q_ROPE_EMPTY, barriers.PAIR)
            for step in range(begin, end - 1):
                page, state = _odd_step(state, call, request, page, step, steps_taken, PLAN, False)
                steps_taken += 1
            page, state = _odd_step(state, call, request, page, end - 1, steps_taken, PLAN, True)
            steps_taken += 1
            items_taken += 1
            state = add_other_sum(state, tiles.row_sum1, tiles.row_sum0)
            epilogue.write(state, split, call, HALF, PLAN)
