"""A CTA that has one block of one work item, in small calls: their time is a chain in which nothing repeats.

Wins "model1, b 2" by 15% (16.5 instead of 19.5 µs; docs/notes/sparse-decode.md).

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

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_pipeline import empty_state
from flashlatte.kernels.hopper.mla_tiles import HALF, LEFT, P0_FULL, RIGHT, SCORE_ROWS
from flashlatte.kernels.hopper.softmax import State, probabilities, raise_row_max
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.consumers import copy_query, score0, write
from flashlatte.ops.sparse_decode.hopper.producer import fill, half_loaded, load_half, with_nan
from flashlatte.ops.sparse_decode.hopper.rows import (
    arrive_full,
    copy_rope,
    cursor_at,
    load_indices,
    locate,
    publish_mask,
)
from flashlatte.ops.sparse_decode.hopper.tiles import OUTPUT

_P_OPERAND = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))


@gluon.jit
def produce(call, PLAN: gl.constexpr):
    k0, work = call.tiles.k0, call.work
    cursor = cursor_at(work.range.first, work.range.first_cost, call, PLAN)
    block = cursor.split.begin
    indices = load_indices(cursor, block, call, PLAN)
    rows = locate(indices, block, cursor.split, call, PLAN)
    left = load_half(rows, LEFT, PLAN)
    right = load_half(rows, RIGHT, PLAN)
    publish_mask(call.masks.block0, rows)
    copy_rope(k0, call.full.k0, rows, PLAN)
    # True: the compiler would else dequantize the right half before it passes the left one on.
    always = call.key_lengths.num_items > 0
    left = with_nan(half_loaded(left, PLAN), rows, PLAN)
    if always:
        fill(k0.left, left, PLAN)
        arrive_full(tiles.K0_LEFT_FULL, PLAN)
    right = with_nan(half_loaded(right, PLAN), rows, PLAN)
    if always:
        fill(k0.right, right, PLAN)
        arrive_full(tiles.K0_RIGHT_FULL, PLAN)
    gdc_launch_dependents()


@gluon.jit
def consume_even(call, PLAN: gl.constexpr):
    """The scores, and the left half of the output."""
    shared, cta_range = call.tiles, call.work.range
    split = schedule.split_of(cta_range.first, cta_range.first_cost, call.work, call.key_lengths, PLAN)
    copy_query(call, cta_range.first, cta_range.first_cost, PLAN)
    state = empty_state(OUTPUT)
    # ``mla_tiles.Tiles`` says what it is for.
    zero = cta_range.first >> 30
    mbarrier.wait(call.full.q, 0)
    scores = score0(call, 0, zero, PLAN)
    row_max = raise_row_max(state.row_max, scores, call.scale)
    shared.row_max0.store(row_max)
    p = probabilities(scores, row_max, call.scale)
    row_sum = gl.sum(p, 1)
    shared.row_sum0.store(row_sum)
    k0_left = shared.k0.left.index(zero)
    p_rounded = p.to(k0_left.dtype)
    shared.p0.index(zero).store(p_rounded)
    fence_async_shared()
    barriers.arrive(P0_FULL, barriers.PAIR)
    out = warpgroup_mma(gl.convert_layout(p_rounded, _P_OPERAND), k0_left, state.out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    state = State(out, row_max, row_sum)
    write(state, cta_range.first, split, call, 0, PLAN)


@gluon.jit
def consume_odd(call, PLAN: gl.constexpr):
    """The right half of the output."""
    shared, cta_range = call.tiles, call.work.range
    split = schedule.split_of(cta_range.first, cta_range.first_cost, call.work, call.key_lengths, PLAN)
    zero = cta_range.first >> 30
    # The even consumer has had both halves before.
    barriers.wait(P0_FULL, barriers.PAIR)
    fence_async_shared()
    out = warpgroup_mma(shared.p0.index(zero), shared.k0.right.index(zero), empty_state(OUTPUT).out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    state = State(out, shared.row_max0.load(SCORE_ROWS), shared.row_sum0.load(SCORE_ROWS))
    write(state, cta_range.first, split, call, HALF, PLAN)
