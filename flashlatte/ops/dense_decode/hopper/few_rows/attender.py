"""The attender: four warps that score a block of keys, and add its values to the output."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, LATENT
from flashlatte.kernels.hopper.ptx.threads import lanes_below_zero
from flashlatte.kernels.hopper.softmax import NO_SCORE, inverse, lse2_of
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.few_rows.queries import take_queries
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import ROWS, SCORES, TILE_EMPTY, TILE_FULL, TILE_MEETING
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.split_kv import device
from flashlatte.split_kv.gluon import PARTIAL, write_partial
from flashlatte.split_kv.outputs import write_lse, write_out

# The largest P of a row is 2^7. Of a maximum beyond 2^24 float32 has no difference of 7: what it has is 0 to 14, and
# float16 holds 2^14.
P_EXPONENT = gl.constexpr(7.0)

_ROWS = gl.constexpr(gl.SliceLayout(0, SCORES))
_KEYS = gl.constexpr(gl.SliceLayout(1, SCORES))


class Request(NamedTuple):
    """A request's split; of each row [16] what its scores are multiplied with, and how many keys it sees."""

    split: Any
    scale: Any
    seen: Any


class State(NamedTuple):
    """Of a request so far: halves of the output [256, 16], not yet divided by the sum; what P is relative to, [16]; and
    sums of P in the places of the scores [64, 16]."""

    left: Any
    right: Any
    row_max: Any
    sums: Any


@gluon.jit
def _empty_state():
    return State(
        gl.zeros([HALF, ROWS], gl.float32, SCORES),
        gl.zeros([HALF, ROWS], gl.float32, SCORES),
        gl.full([ROWS], NO_SCORE, gl.float32, _ROWS),
        gl.zeros([KEYS, ROWS], gl.float32, SCORES),
    )


@gluon.jit
def _mask(scores, request, page, block, PLAN: gl.constexpr):
    """Scores [64, 16] of a block, -inf where a row does not see the key. ``page`` as ``schedule.page_of`` has it."""
    absent = page < 0
    if PLAN.box < KEYS:
        absent_boxes = lanes_below_zero(page)
        absent = absent_boxes != 0
    if (block * KEYS + KEYS > gl.min(request.seen, 0)) | absent:
        key = block * KEYS + gl.arange(0, KEYS, _KEYS)
        if PLAN.box < KEYS:
            box = gl.arange(0, KEYS, _KEYS) // PLAN.box
            key = gl.where((absent_boxes >> box) & 1 == 0, key, 2**31 - 1)
        else:
            key = gl.where(absent, 2**31 - 1, key)
        scores = gl.where(key[:, None] < request.seen[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _attend(state, call, request, k, block, zero, NUMBER: gl.constexpr, PLAN: gl.constexpr):
    """Add a block to the state, whose halves are numbers NUMBER and NUMBER + 1 of their step. ``zero`` is 0, which the
    compiler may not know (``mla_tiles.Tiles``)."""
    q, p_tile = call.tiles.q, call.tiles.p.index(zero)
    left, right = k.left.index(zero), k.right.index(zero)
    page = schedule.page_of(call.table, request.split, block, PLAN)
    scores = gl.zeros([KEYS, ROWS], gl.float32, SCORES)
    barriers.wait(TILE_FULL + NUMBER, TILE_MEETING)
    scores = warpgroup_mma(left, q.left.index(zero).permute((1, 0)), scores, use_acc=False, is_async=True)
    barriers.wait(TILE_FULL + NUMBER + 1, TILE_MEETING)
    scores = warpgroup_mma(right, q.right.index(zero).permute((1, 0)), scores, is_async=True)
    if PLAN.has_rope:
        scores = warpgroup_mma(k.rope.index(zero), q.rope.index(zero).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores]) * request.scale[None, :]
    scores = _mask(scores, request, page, block, PLAN)

    row_max = gl.maximum(state.row_max, gl.max(scores, 0) - P_EXPONENT)
    p = gl.exp2(scores - row_max[None, :])
    p_tile.store(p.to(gl.float16))
    fence_async_shared()
    alpha = gl.exp2(state.row_max - row_max)[None, :]
    out_left, out_right = state.left * alpha, state.right * alpha
    cta_barrier()
    out_left = warpgroup_mma(left.permute((1, 0)), p_tile, out_left, is_async=True)
    out_right = warpgroup_mma(right.permute((1, 0)), p_tile, out_right, is_async=True)
    out_left = warpgroup_mma_wait(1, deps=[out_left])
    barriers.arrive(TILE_EMPTY + NUMBER, TILE_MEETING)
    out_right = warpgroup_mma_wait(0, deps=[out_right])
    barriers.arrive(TILE_EMPTY + NUMBER + 1, TILE_MEETING)
    return State(out_left, out_right, row_max, state.sums * alpha + p)


@gluon.jit
def _write_half(values, lse2, split, call, FIRST_COL: gl.constexpr, PLAN: gl.constexpr):
    """Write half of an output ``values`` [256, 16], a result or a partial output; the left one brings the lse."""
    work, results, outputs = call.work, call.results, call.results.outputs
    values = values.permute((1, 0))
    LAYOUT: gl.constexpr = values.type.layout
    lse2 = gl.convert_layout(lse2, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    # Made to look as if it depended on the request: else what follows from it would be worked out before the loop, and
    # lie in registers over all blocks.
    row = (split.item >> 31) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    continues = split.begin > 0
    if (continues == 0) & (split.end == split.steps):
        col = FIRST_COL + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
        write_out(outputs, split.item, work.group.kv_head, row, col, values, lse2, LATENT, PLAN.out_align, False)
        if FIRST_COL == 0:
            write_lse(outputs, split.item, work.group.kv_head, row, lse2)
    elif results.scratch is not None:
        partial = results.scratch + schedule.partial(work, continues, PLAN) * PARTIAL
        write_partial(partial, row, row < outputs.rows, values, lse2, FIRST_COL)


@gluon.jit
def attend(call, PLAN: gl.constexpr):
    for number in gl.static_range(4):
        barriers.arrive(TILE_EMPTY + number, TILE_MEETING)
    k0, k1 = call.tiles.k0, call.tiles.k1
    token = gl.arange(0, ROWS, _ROWS) // call.query.heads
    cta_range = call.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, call.key_lengths)
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, call.work, PLAN)
        cost += PLAN.overhead + split.steps
        if split.end > split.begin:
            scale = take_queries(call, item, PLAN) * call.scale
            request = Request(split, scale, gl.minimum(length - call.causal_offset + token, length))
            state = _empty_state()
            for step in range(split.begin, split.end):
                zero = steps_taken >> 30
                state = _attend(state, call, request, k0, 2 * step, zero, 0, PLAN)
                state = _attend(state, call, request, k1, 2 * step + 1, zero, 2, PLAN)
                steps_taken += 1
            row_sum = gl.sum(state.sums, 0)
            factor = (inverse(row_sum) * call.results.k_scale)[None, :]
            lse2 = lse2_of(state.row_max, row_sum)
            _write_half(state.left * factor, lse2, split, call, 0, PLAN)
            _write_half(state.right * factor, lse2, split, call, HALF, PLAN)
        length = device.key_count(item + 1, call.key_lengths)
