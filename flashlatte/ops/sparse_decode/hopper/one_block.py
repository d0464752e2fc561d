"""A program whose part is one block of one item, in small calls: their time is a chain in which nothing repeats.

Producer and consumers are the usual ones without loops and without block 1. Both halves are asked for at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from flashlatte.kernels.hopper import named_barriers
from flashlatte.ops.sparse_decode.hopper import epilogue, producing, schedule, tiles
from flashlatte.ops.sparse_decode.hopper.consumers import State, copy_query, empty_state, hide, raised, score0
from flashlatte.ops.sparse_decode.hopper.producer import fill, half_arrived, indices_of, load_half, with_nan
from flashlatte.ops.sparse_decode.hopper.selection import is_extra, locate
from flashlatte.ops.sparse_decode.hopper.tiles import HALF, KEYS, ROWS, SCORE_ROWS, SCORES, TWO, WEIGHT_OPERAND


@gluon.jit
def produce(caches, selection, call, PLAN: gl.constexpr):
    lists, place, shared, ready = call.lists, call.place, call.tiles, call.ready
    cursor = producing.cursor_at(place.part.first, place.part.first_cost, selection, place, lists, PLAN)
    block = cursor.share.begin
    indices = indices_of(cursor, block, lists, PLAN)
    rows = locate(indices, is_extra(block, cursor.share, lists), caches, PLAN)
    left = load_half(rows, 0, PLAN)
    right = load_half(rows, 1, PLAN)
    producing.publish(shared.mask0, rows)
    producing.copy_rope(shared.k0_right, shared.k0_rope, rows, ready.k0_right, PLAN)
    # True: the compiler would else widen the right half before it passes the left one on.
    always = lists.num_items > 0
    left = with_nan(half_arrived(left, 0, PLAN), rows, 0, PLAN)
    if always:
        fill(shared.k0_left, left, 0, PLAN)
        producing.arrive(tiles.K0_LEFT_READY, PLAN)
    right = with_nan(half_arrived(right, 1, PLAN), rows, 1, PLAN)
    if always:
        fill(shared.k0_right, right, 1, PLAN)
        producing.arrive(tiles.K0_RIGHT_READY, PLAN)
    gdc_launch_dependents()


@gluon.jit
def consume_even(call, PLAN: gl.constexpr, OUT_ALIGN: gl.constexpr):
    """The scores, and the left half of the output."""
    shared, part = call.tiles, call.place.part
    share = schedule.share_of(part.first, part.first_cost, call.place, call.lists, PLAN)
    copy_query(call, part.first, part.first_cost, PLAN)
    state = empty_state()
    # A zero that the compiler cannot see through, for ``tiles.Tiles``.
    z = part.first >> 30
    mbarrier.wait(call.ready.query, 0)
    scores = score0(call, 0, z, gl.zeros([ROWS, KEYS], gl.float32, SCORES), PLAN)
    scores = hide(warpgroup_mma_wait(0, deps=[scores]), shared.mask0)
    reference = raised(state.reference, scores, call.scale)
    shared.reference0.store(reference)
    weights = gl.exp2(scores * call.scale - reference[:, None])
    total = gl.sum(weights, 1)
    shared.sums0.store(total)
    k0_left = shared.k0_left.index(z)
    rounded = weights.to(k0_left.dtype)
    shared.weights0.index(z).store(rounded)
    fence_async_shared()
    named_barriers.arrive(tiles.WEIGHTS0_READY, TWO)
    output = warpgroup_mma(gl.convert_layout(rounded, WEIGHT_OPERAND), k0_left, state.output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output])
    state = State(output, reference, total)
    epilogue.write(state, part.first, share, call.place, call.results, 0, PLAN, OUT_ALIGN)


@gluon.jit
def consume_odd(call, PLAN: gl.constexpr, OUT_ALIGN: gl.constexpr):
    """The right half of the output."""
    shared, part = call.tiles, call.place.part
    share = schedule.share_of(part.first, part.first_cost, call.place, call.lists, PLAN)
    z = part.first >> 30
    # The even consumer has had both halves before.
    named_barriers.wait(tiles.WEIGHTS0_READY, TWO)
    fence_async_shared()
    output = warpgroup_mma(shared.weights0.index(z), shared.k0_right.index(z), empty_state().output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output])
    state = State(output, shared.reference0.load(SCORE_ROWS), shared.sums0.load(SCORE_ROWS))
    epilogue.write(state, part.first, share, call.place, call.results, HALF, PLAN, OUT_ALIGN)
