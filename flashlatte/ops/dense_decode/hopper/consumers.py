"""The two consumers: four warps each, that score the keys and sum the values.

The even consumer scores block 0 of a step and owns columns 0 to 255 of the output, the odd one block 1 and columns
256 to 511. Each needs the other's weights, and both the same reference for them (near the running maximum), which
goes from the even consumer to the odd one and back.
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

from flashlatte.kernels.hopper import named_barriers
from flashlatte.kernels.hopper.lazy_softmax import HEADROOM, rescale
from flashlatte.ops.dense_decode.hopper import epilogue, schedule
from flashlatte.ops.dense_decode.hopper.scores import hide, score_left, score_right, sight
from flashlatte.ops.dense_decode.hopper.tiles import (
    HALF,
    K0_LEFT_FREE,
    K0_RIGHT_FREE,
    K1_LEFT_FREE,
    K1_RIGHT_FREE,
    KEYS,
    OUTPUT,
    OUTPUT_ROWS,
    PAIR,
    QUERY_FREE,
    REFERENCE1_READY,
    ROPE_OPERAND,
    ROPE_TAKEN,
    ROWS,
    SCORE_ROWS,
    SCORES,
    SUMS_READY,
    THREE,
    TWO,
    WEIGHT_OPERAND,
    WEIGHTS0_READY,
    WEIGHTS1_READY,
)
from flashlatte.split_kv import device

# The reference of a row that has seen no key: below any score, and finite, so that it can be subtracted from itself.
_NO_SCORE = gl.constexpr(-1e30)


class Call(NamedTuple):
    """What stays the same over all requests of a program.

    Attributes:
        lists: lengths of the requests (``device.KeyLists``).
        table: their pages (``schedule.Table``).
        place: the program's share of the work (``schedule.Place``).
        hidden: keys at a request's end that its first query token does not see.
        scale: softmax_scale · log2(e).
        tiles, ready: shared memory.
        results: where results go (``epilogue.Results``).
    """

    lists: Any
    table: Any
    place: Any
    hidden: Any
    scale: Any
    tiles: Any
    ready: Any
    results: Any


class Request(NamedTuple):
    """The request at hand: its number, its blocks of keys, which of them are seen, the query's rope in registers
    (None without)."""

    item: Any
    blocks: Any
    sight: Any
    q_rope: Any


class State(NamedTuple):
    """Of one consumer, for the request at hand: its half of the output [64, 256], reference and sum of weights [64]."""

    output: Any
    reference: Any
    total: Any


@gluon.jit
def _empty_state():
    return State(
        gl.zeros([ROWS, HALF], gl.float32, OUTPUT),
        gl.full([ROWS], _NO_SCORE, gl.float32, SCORE_ROWS),
        gl.zeros([ROWS], gl.float32, SCORE_ROWS),
    )


@gluon.jit
def _rescale(output, decay):
    return rescale(output, gl.convert_layout(decay, OUTPUT_ROWS)[:, None])


@gluon.jit
def _raised(reference, scores, scale):
    """The reference, raised to the scores' row maximum where it would be too far below."""
    maximum = gl.max(scores, 1) * scale
    return gl.where(maximum - reference > HEADROOM, maximum, reference)


@gluon.jit
def _score0_left(call, phase, z, scores):
    """Block 0 begins with its left half, which the even consumer frees itself, and first."""
    tiles = call.tiles
    return score_left(tiles.q_left.index(z), tiles.k0_left.index(z), call.ready.k0_left, phase, scores)


@gluon.jit
def _score0_right(call, request, phase, z, scores):
    tiles = call.tiles
    return score_right(
        tiles.q_right.index(z),
        request.q_rope,
        tiles.k0_right.index(z),
        tiles.k0_rope.index(z),
        call.ready.k0_right,
        phase,
        scores,
    )


@gluon.jit
def _score1(call, request, phase, z, scores):
    """Block 1 begins with its left half, too: the even consumer is done with it before the odd one with the right."""
    tiles = call.tiles
    scores = score_left(tiles.q_left.index(z), tiles.k1_left.index(z), call.ready.k1_left, phase, scores)
    return score_right(
        tiles.q_right.index(z),
        request.q_rope,
        tiles.k1_right.index(z),
        tiles.k1_rope.index(z),
        call.ready.k1_right,
        phase,
        scores,
    )


@gluon.jit
def _even_step(scores, state, call, request, page, step, phase, z, PLAN: gl.constexpr, LAST: gl.constexpr):
    """From the scores of block 0 to those of the next step's block 0 and its page, unless this step is the last."""
    tiles = call.tiles
    k0_left = tiles.k0_left.index(z)
    scores = hide(scores, request.sight, page, step * PAIR, k0_left, tiles.k0_right.index(z))
    reference0 = _raised(state.reference, scores, call.scale)
    tiles.reference0.store(reference0)
    weights = gl.exp2(scores * call.scale - reference0[:, None])
    rounded = weights.to(k0_left.dtype)
    tiles.weights0.index(z).store(rounded)
    fence_async_shared()
    named_barriers.arrive(WEIGHTS0_READY, TWO)
    decay = gl.exp2(state.reference - reference0)
    output = _rescale(state.output, decay)
    operand = gl.convert_layout(rounded, WEIGHT_OPERAND)
    output = warpgroup_mma(operand, k0_left, output, is_async=True)
    total = state.total * decay + gl.sum(weights, 1)
    output = warpgroup_mma_wait(0, deps=[output])
    named_barriers.arrive(K0_LEFT_FREE, TWO)
    if not LAST:
        # Not before the fence above, which would wait for it.
        page = schedule.page_of(call.table, request.item, 2 * step + 2, request.blocks, PLAN)

    named_barriers.wait(REFERENCE1_READY, TWO)
    reference1 = tiles.reference1.load(SCORE_ROWS)
    decay = gl.exp2(reference0 - reference1)
    total = total * decay
    output = _rescale(output, decay)
    named_barriers.wait(WEIGHTS1_READY, TWO)
    output = warpgroup_mma(tiles.weights1.index(z), tiles.k1_left.index(z), output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output])
    named_barriers.arrive(K1_LEFT_FREE, TWO)
    if not LAST:
        scores = _score0_left(call, phase ^ 1, z, scores)
        scores = _score0_right(call, request, phase ^ 1, z, scores)
        scores = warpgroup_mma_wait(0, deps=[scores])
    return scores, page, State(output, reference1, total)


@gluon.jit
def _odd_step(state, call, request, page, step, phase, z, PLAN: gl.constexpr, LAST: gl.constexpr):
    """A whole step, and the page of the next one, unless this is the last."""
    tiles = call.tiles
    k1_right = tiles.k1_right.index(z)
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _score1(call, request, phase, z, scores)
    # The product with block 0's values stands in the queue behind these scores, and runs under their softmax.
    named_barriers.wait(WEIGHTS0_READY, TWO)
    reference0 = tiles.reference0.load(SCORE_ROWS)
    output = _rescale(state.output, gl.exp2(state.reference - reference0))
    output = warpgroup_mma(tiles.weights0.index(z), tiles.k0_right.index(z), output, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if LAST:
        named_barriers.arrive(QUERY_FREE, THREE)
    scores = hide(scores, request.sight, page, step * PAIR + KEYS, tiles.k1_left.index(z), k1_right)
    reference1 = _raised(reference0, scores, call.scale)
    tiles.reference1.store(reference1)
    named_barriers.arrive(REFERENCE1_READY, TWO)
    weights = gl.exp2(scores * call.scale - reference1[:, None])
    rounded = weights.to(k1_right.dtype)
    tiles.weights1.index(z).store(rounded)
    fence_async_shared()
    named_barriers.arrive(WEIGHTS1_READY, TWO)
    if not LAST:
        page = schedule.page_of(call.table, request.item, 2 * step + 3, request.blocks, PLAN)
    operand = gl.convert_layout(rounded, WEIGHT_OPERAND)
    decay = gl.exp2(reference0 - reference1)
    output = warpgroup_mma_wait(0, deps=[output])
    named_barriers.arrive(K0_RIGHT_FREE, TWO)
    output = _rescale(output, decay)
    output = warpgroup_mma(operand, k1_right, output, is_async=True)
    total = state.total * gl.exp2(state.reference - reference1) + gl.sum(weights, 1)
    output = warpgroup_mma_wait(0, deps=[output])
    named_barriers.arrive(K1_RIGHT_FREE, TWO)
    return page, State(output, reference1, total)


@gluon.jit
def _add_other_sum(total, mine, other):
    mine.store(total)
    named_barriers.wait(SUMS_READY, TWO)
    return total + other.load(SCORE_ROWS)


@gluon.jit
def consume_even(call, PLAN: gl.constexpr, OUT_ALIGN: gl.constexpr):
    named_barriers.arrive(QUERY_FREE, THREE)
    named_barriers.arrive(K0_LEFT_FREE, TWO)
    named_barriers.arrive(K1_LEFT_FREE, TWO)
    tiles = call.tiles
    part = call.place.part
    cost = part.first_cost
    length = device.key_count(part.first, call.lists)
    items_taken = 0
    steps_taken = 0
    for item in range(part.first, part.stop):
        steps = schedule.num_steps(length)
        begin, end = device.share(part, cost, steps, PLAN.overhead)
        blocks = schedule.num_blocks(length)
        seen = sight(length, call.hidden, call.results.outputs.heads, call.place.group.first_row)
        cost += PLAN.overhead + steps
        length = device.key_count(item + 1, call.lists)
        if end > begin:
            page = schedule.page_of(call.table, item, 2 * begin, blocks, PLAN)
            state = _empty_state()
            scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
            phase = steps_taken & 1
            z = steps_taken >> 30
            mbarrier.wait(call.ready.query, items_taken & 1)
            if PLAN.has_rope:
                q_rope = tiles.q_rope.index(0).load(ROPE_OPERAND)
            else:
                q_rope: gl.constexpr = None
            request = Request(item, blocks, seen, q_rope)
            scores = _score0_left(call, phase, z, scores)
            scores = _score0_right(call, request, phase, z, scores)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if PLAN.has_rope:
                named_barriers.wait(ROPE_TAKEN, TWO)
            for step in range(begin, end - 1):
                scores, page, state = _even_step(
                    scores, state, call, request, page, step, steps_taken & 1, steps_taken >> 30, PLAN, False
                )
                steps_taken += 1
            named_barriers.arrive(QUERY_FREE, THREE)
            scores, page, state = _even_step(
                scores, state, call, request, page, end - 1, steps_taken & 1, steps_taken >> 30, PLAN, True
            )
            steps_taken += 1
            items_taken += 1
            total = _add_other_sum(state.total, tiles.sums0, tiles.sums1)
            share = epilogue.Share(item, begin > 0, end == steps)
            epilogue.write(state.output, state.reference, total, share, call.place, call.results, 0, PLAN, OUT_ALIGN)


@gluon.jit
def consume_odd(call, PLAN: gl.constexpr, OUT_ALIGN: gl.constexpr):
    named_barriers.arrive(QUERY_FREE, THREE)
    named_barriers.arrive(K0_RIGHT_FREE, TWO)
    named_barriers.arrive(K1_RIGHT_FREE, TWO)
    tiles = call.tiles
    part = call.place.part
    cost = part.first_cost
    length = device.key_count(part.first, call.lists)
    items_taken = 0
    steps_taken = 0
    for item in range(part.first, part.stop):
        steps = schedule.num_steps(length)
        begin, end = device.share(part, cost, steps, PLAN.overhead)
        blocks = schedule.num_blocks(length)
        seen = sight(length, call.hidden, call.results.outputs.heads, call.place.group.first_row)
        cost += PLAN.overhead + steps
        length = device.key_count(item + 1, call.lists)
        if end > begin:
            page = schedule.page_of(call.table, item, 2 * begin + 1, blocks, PLAN)
            state = _empty_state()
            mbarrier.wait(call.ready.query, items_taken & 1)
            if PLAN.has_rope:
                q_rope = tiles.q_rope.index(0).load(ROPE_OPERAND)
            else:
                q_rope: gl.constexpr = None
            if PLAN.has_rope:
                named_barriers.arrive(ROPE_TAKEN, TWO)
            request = Request(item, blocks, seen, q_rope)
            for step in range(begin, end - 1):
                page, state = _odd_step(
                    state, call, request, page, step, steps_taken & 1, steps_taken >> 30, PLAN, False
                )
                steps_taken += 1
            page, state = _odd_step(state, call, request, page, end - 1, steps_taken & 1, steps_taken >> 30, PLAN, True)
            steps_taken += 1
            items_taken += 1
            total = _add_other_sum(state.total, tiles.sums1, tiles.sums0)
            share = epilogue.Share(item, begin > 0, end == steps)
            epilogue.write(state.output, state.reference, total, share, call.place, call.results, HALF, PLAN, OUT_ALIGN)
