"""The two consumers: four warps each, that score the keys and sum the values.

The even consumer scores block 0 of a pair and owns columns 0 to 255 of the output, the odd one block 1 and columns
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

from flashlatte.kernels.hopper import lazy_softmax, named_barriers
from flashlatte.ops.sparse_decode.hopper import epilogue, exchange, query, schedule, tiles
from flashlatte.ops.sparse_decode.hopper.tiles import (
    CONSUMER,
    HALF,
    KEYS,
    MODEL1,
    OUTPUT,
    OUTPUT_ROWS,
    PLAIN,
    ROWS,
    SCORE_COLS,
    SCORE_ROWS,
    SCORES,
    TWO,
    WEIGHT_OPERAND,
)

# The reference of a row that has seen no key: below any score, and finite, so that it can be subtracted from itself.
_NO_SCORE = gl.constexpr(-1e30)


class Call(NamedTuple):
    """What stays the same over all items of a program.

    Attributes:
        query: all queries (``query.Query``).
        lists: lengths of the items (``device.KeyLists``).
        place: the program's share of the work (``schedule.Place``).
        scale: softmax_scale · log2(e).
        tiles, ready: shared memory.
        link: to the other program of a pair (``exchange.Link``), None where there is none.
        results: where results go (``epilogue.Results``).
    """

    query: Any
    lists: Any
    place: Any
    scale: Any
    tiles: Any
    ready: Any
    link: Any
    results: Any


class State(NamedTuple):
    """Of one consumer, for the item at hand: its half of the output [64, 256], reference and sum of weights [64]."""

    output: Any
    reference: Any
    total: Any


@gluon.jit
def empty_state():
    return State(
        gl.zeros([ROWS, HALF], gl.float32, OUTPUT),
        gl.full([ROWS], _NO_SCORE, gl.float32, SCORE_ROWS),
        gl.zeros([ROWS], gl.float32, SCORE_ROWS),
    )


@gluon.jit
def _rescale(output, decay):
    return lazy_softmax.rescale(output, gl.convert_layout(decay, OUTPUT_ROWS, assert_trivial=True)[:, None])


@gluon.jit
def raised(reference, scores, scale):
    """The reference, raised to the scores' row maximum where it would be too far below."""
    maximum = gl.max(scores, 1) * scale
    return gl.where(maximum - reference > lazy_softmax.HEADROOM, maximum, reference)


@gluon.jit
def _release(call, FREE: gl.constexpr, PLAN: gl.constexpr):
    """Let a half be filled again: by the producer, and in a pair of programs by both."""
    if PLAN.paired:
        exchange.release(FREE, call.link)
    else:
        named_barriers.arrive(FREE, CONSUMER + PLAN.producer_threads)


@gluon.jit
def _begin(call, FIRST_FREE: gl.constexpr, SECOND_FREE: gl.constexpr, PLAN: gl.constexpr):
    if PLAN.paired:
        exchange.arrive()
        exchange.meet()
    else:
        _release(call, FIRST_FREE, PLAN)
        _release(call, SECOND_FREE, PLAN)


@gluon.jit
def _await(call, copied, phase, READY: gl.constexpr, PLAN: gl.constexpr):
    named_barriers.wait(READY, CONSUMER + PLAN.producer_threads)
    if PLAN.paired:
        exchange.wait(READY, call.link, phase)
    if PLAN.format == PLAIN:
        mbarrier.wait(copied, phase)
    # Here, and not before the producer's arrival: this fence waits for all loads of its thread.
    fence_async_shared()


@gluon.jit
def _score_left(call, q, k, copied, phase, scores, READY: gl.constexpr, USE_ACC: gl.constexpr, PLAN: gl.constexpr):
    _await(call, copied, phase, READY, PLAN)
    return warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _score_right(call, q, k, copied, phase, scores, READY: gl.constexpr, USE_ACC: gl.constexpr, PLAN: gl.constexpr):
    if PLAN.format == MODEL1:
        # Its last 64 columns are copied.
        mbarrier.wait(copied, phase)
    _await(call, copied, phase, READY, PLAN)
    return warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _score_rope(q_rope, k_rope, copied, phase, scores, PLAN: gl.constexpr):
    if PLAN.has_rope:
        if PLAN.format != PLAIN:
            mbarrier.wait(copied, phase)
            fence_async_shared()
        scores = warpgroup_mma(q_rope, k_rope.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def score0(call, phase, z, scores, PLAN: gl.constexpr):
    """Block 0 begins with its left half, which is free first."""
    shared = call.tiles
    ready = call.ready
    scores = _score_left(
        call,
        shared.q_left.index(z),
        shared.k0_left.index(z),
        ready.k0_left,
        phase,
        scores,
        tiles.K0_LEFT_READY,
        False,
        PLAN,
    )
    scores = _score_right(
        call,
        shared.q_right.index(z),
        shared.k0_right.index(z),
        ready.k0_right,
        phase,
        scores,
        tiles.K0_RIGHT_READY,
        True,
        PLAN,
    )
    return _score_rope(shared.q_rope.index(z), shared.k0_rope.index(z), ready.k0_right, phase, scores, PLAN)


@gluon.jit
def _score1(call, phase, z, scores, PLAN: gl.constexpr):
    """Block 1 begins with its right half."""
    shared = call.tiles
    ready = call.ready
    scores = _score_right(
        call,
        shared.q_right.index(z),
        shared.k1_right.index(z),
        ready.k1_right,
        phase,
        scores,
        tiles.K1_RIGHT_READY,
        False,
        PLAN,
    )
    scores = _score_left(
        call,
        shared.q_left.index(z),
        shared.k1_left.index(z),
        ready.k1_left,
        phase,
        scores,
        tiles.K1_LEFT_READY,
        True,
        PLAN,
    )
    return _score_rope(shared.q_rope.index(z), shared.k1_rope.index(z), ready.k1_right, phase, scores, PLAN)


@gluon.jit
def hide(scores, mask):
    selected = mask.load(SCORE_COLS) != 0
    return gl.where(selected[None, :], scores, float("-inf"))


@gluon.jit
def copy_query(call, item, cost, PLAN: gl.constexpr):
    """Ask for the queries of an item that starts at ``cost``, if the program has something of it."""
    if schedule.has_share(item, cost, call.place, PLAN):
        query.copy(call.query, item, call.lists.tokens, call.place.group, call.tiles, call.ready.query, PLAN.has_rope)


@gluon.jit
def _even_step(scores, state, call, z, PLAN: gl.constexpr):
    """From the scores of block 0 to the output of both blocks."""
    shared = call.tiles
    k0_left = shared.k0_left.index(z)
    scores = hide(scores, shared.mask0)
    reference0 = raised(state.reference, scores, call.scale)
    shared.reference0.store(reference0)
    weights = gl.exp2(scores * call.scale - reference0[:, None])
    rounded = weights.to(k0_left.dtype)
    shared.weights0.index(z).store(rounded)
    decay = gl.exp2(state.reference - reference0)
    total = state.total * decay + gl.sum(weights, 1)
    fence_async_shared()
    named_barriers.arrive(tiles.WEIGHTS0_READY, TWO)
    output = _rescale(state.output, decay)
    operand = gl.convert_layout(rounded, WEIGHT_OPERAND)
    output = warpgroup_mma(operand, k0_left, output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output])
    _release(call, tiles.K0_LEFT_FREE, PLAN)

    named_barriers.wait(tiles.REFERENCE1_READY, TWO)
    reference1 = shared.reference1.load(SCORE_ROWS)
    decay = gl.exp2(reference0 - reference1)
    total = total * decay
    output = _rescale(output, decay)
    named_barriers.wait(tiles.WEIGHTS1_READY, TWO)
    output = warpgroup_mma(shared.weights1.index(z), shared.k1_left.index(z), output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output])
    _release(call, tiles.K1_LEFT_FREE, PLAN)
    return State(output, reference1, total)


@gluon.jit
def _odd_step(state, call, phase, z, PLAN: gl.constexpr):
    """A whole pair: the scores of block 1, and the output of both blocks."""
    shared = call.tiles
    k1_right = shared.k1_right.index(z)
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _score1(call, phase, z, scores, PLAN)
    # The product with block 0's values stands in the queue behind these scores, and runs under their softmax.
    named_barriers.wait(tiles.WEIGHTS0_READY, TWO)
    reference0 = shared.reference0.load(SCORE_ROWS)
    output = _rescale(state.output, gl.exp2(state.reference - reference0))
    output = warpgroup_mma(shared.weights0.index(z), shared.k0_right.index(z), output, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    scores = hide(scores, shared.mask1)
    reference1 = raised(reference0, scores, call.scale)
    shared.reference1.store(reference1)
    named_barriers.arrive(tiles.REFERENCE1_READY, TWO)
    weights = gl.exp2(scores * call.scale - reference1[:, None])
    rounded = weights.to(k1_right.dtype)
    shared.weights1.index(z).store(rounded)
    decay = gl.exp2(reference0 - reference1)
    total = state.total * gl.exp2(state.reference - reference1) + gl.sum(weights, 1)
    fence_async_shared()
    named_barriers.arrive(tiles.WEIGHTS1_READY, TWO)
    operand = gl.convert_layout(rounded, WEIGHT_OPERAND)
    output = warpgroup_mma_wait(0, deps=[output])
    _release(call, tiles.K0_RIGHT_FREE, PLAN)
    output = _rescale(output, decay)
    output = warpgroup_mma(operand, k1_right, output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output])
    _release(call, tiles.K1_RIGHT_FREE, PLAN)
    return State(output, reference1, total)


@gluon.jit
def _with_both_sums(state, own, other):
    """After the last product of an item: with the sum of both consumers' weights."""
    own.store(state.total)
    # Nobody waits here any more for what the barrier else stands for.
    named_barriers.wait(tiles.WEIGHTS0_READY, TWO)
    return State(state.output, state.reference, state.total + other.load(SCORE_ROWS))


@gluon.jit
def consume_even(call, PLAN: gl.constexpr, OUT_ALIGN: gl.constexpr):
    _begin(call, tiles.K0_LEFT_FREE, tiles.K1_LEFT_FREE, PLAN)
    part = call.place.part
    copy_query(call, part.first, part.first_cost, PLAN)
    cost = part.first_cost
    items_taken = 0
    pairs_taken = 0
    for item in range(part.first, part.stop, call.place.stride):
        share = schedule.share_of(item, cost, call.place, call.lists, PLAN)
        cost += PLAN.overhead + share.blocks
        pairs = schedule.pairs_of(share)
        if pairs > 0:
            state = empty_state()
            mbarrier.wait(call.ready.query, items_taken & 1)
            for _ in range(pairs):
                scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
                scores = score0(call, pairs_taken & 1, pairs_taken >> 30, scores, PLAN)
                scores = warpgroup_mma_wait(0, deps=[scores])
                state = _even_step(scores, state, call, pairs_taken >> 30, PLAN)
                pairs_taken += 1
            items_taken += 1
            # The odd consumer, whose weights have come, has no use for the present ones either.
            copy_query(call, item + call.place.stride, cost, PLAN)
            state = _with_both_sums(state, call.tiles.sums0, call.tiles.sums1)
            epilogue.write(state, item, share, call.place, call.results, 0, PLAN, OUT_ALIGN)


@gluon.jit
def consume_odd(call, PLAN: gl.constexpr, OUT_ALIGN: gl.constexpr):
    _begin(call, tiles.K0_RIGHT_FREE, tiles.K1_RIGHT_FREE, PLAN)
    part = call.place.part
    cost = part.first_cost
    items_taken = 0
    pairs_taken = 0
    for item in range(part.first, part.stop, call.place.stride):
        share = schedule.share_of(item, cost, call.place, call.lists, PLAN)
        cost += PLAN.overhead + share.blocks
        pairs = schedule.pairs_of(share)
        if pairs > 0:
            state = empty_state()
            mbarrier.wait(call.ready.query, items_taken & 1)
            for _ in range(pairs):
                state = _odd_step(state, call, pairs_taken & 1, pairs_taken >> 30, PLAN)
                pairs_taken += 1
            items_taken += 1
            state = _with_both_sums(state, call.tiles.sums1, call.tiles.sums0)
            epilogue.write(state, item, share, call.place, call.results, HALF, PLAN, OUT_ALIGN)
