"""The consumer: four warps that compute the scores of a block of keys and add its values to the output."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, LATENT
from flashlatte.kernels.hopper.ptx.threads import ballot_negative
from flashlatte.kernels.hopper.softmax import NO_SCORE, inverse, lse2_of
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.few_rows.queries import load_queries
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import ROWS, SCORES, TILE_BARRIER_THREADS, TILE_EMPTY, TILE_FULL
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.split_kv import device
from flashlatte.split_kv.gluon_device import PARTIAL, write_partial
from flashlatte.split_kv.outputs import write_lse, write_out

# The largest P of a row is 2^7. For a row_max above 2^24, float32 cannot represent a difference of 7; the rounded
# difference is 0 to 14, and 2^14 fits float16.
P_EXPONENT = gl.constexpr(7.0)

_ROWS = gl.constexpr(gl.SliceLayout(0, SCORES))
_KEYS = gl.constexpr(gl.SliceLayout(1, SCORES))


class FewRowsRequest(NamedTuple):
    """A request's split; the scale of the scores of each row [16], and its number of visible keys."""

    split: Any
    scale: Any
    visible: Any


class FewRowsState(NamedTuple):
    """The online-softmax state: unnormalized halves of the output [256, 16], row_max [16], and elementwise sums of P
    [64, 16]."""

    left: Any
    right: Any
    row_max: Any
    sums: Any


@gluon.jit
def _empty_state():
    return FewRowsState(
        gl.zeros([HALF, ROWS], gl.float32, SCORES),
        gl.zeros([HALF, ROWS], gl.float32, SCORES),
        gl.full([ROWS], NO_SCORE, gl.float32, _ROWS),
        gl.zeros([KEYS, ROWS], gl.float32, SCORES),
    )


@gluon.jit
def _mask(scores, request, page, block, CONFIG: gl.constexpr):
    """Scores [64, 16] of a block, with -inf for masked keys. ``page``: from ``schedule.page_of``."""
    absent = page < 0
    if CONFIG.box < KEYS:
        absent_boxes = ballot_negative(page)
        absent = absent_boxes != 0
    if (block * KEYS + KEYS > gl.min(request.visible, 0)) | absent:
        key = block * KEYS + gl.arange(0, KEYS, _KEYS)
        if CONFIG.box < KEYS:
            box = gl.arange(0, KEYS, _KEYS) // CONFIG.box
            key = gl.where((absent_boxes >> box) & 1 == 0, key, 2**31 - 1)
        else:
            key = gl.where(absent, 2**31 - 1, key)
        scores = gl.where(key[:, None] < request.visible[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _attend(state, args, request, k, block, zero, NUMBER: gl.constexpr, CONFIG: gl.constexpr):
    """Add a block to the state. Its halves are halves NUMBER and NUMBER + 1 of the step. ``zero``: 0, opaque to the
    compiler (``mla_tiles.MlaTiles``)."""
    q, p_tile = args.tiles.q, args.tiles.p.index(zero)
    left, right = k.left.index(zero), k.right.index(zero)
    page = schedule.page_of(args.table, request.split, block, CONFIG)
    scores = gl.zeros([KEYS, ROWS], gl.float32, SCORES)
    barriers.wait(TILE_FULL + NUMBER, TILE_BARRIER_THREADS)
    scores = warpgroup_mma(left, q.left.index(zero).permute((1, 0)), scores, use_acc=False, is_async=True)
    barriers.wait(TILE_FULL + NUMBER + 1, TILE_BARRIER_THREADS)
    scores = warpgroup_mma(right, q.right.index(zero).permute((1, 0)), scores, is_async=True)
    if CONFIG.has_rope:
        scores = warpgroup_mma(k.rope.index(zero), q.rope.index(zero).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores]) * request.scale[None, :]
    scores = _mask(scores, request, page, block, CONFIG)

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
    barriers.arrive(TILE_EMPTY + NUMBER, TILE_BARRIER_THREADS)
    out_right = warpgroup_mma_wait(0, deps=[out_right])
    barriers.arrive(TILE_EMPTY + NUMBER + 1, TILE_BARRIER_THREADS)
    return FewRowsState(out_left, out_right, row_max, state.sums * alpha + p)


@gluon.jit
def _write_half(values, lse2, split, args, FIRST_COL: gl.constexpr, CONFIG: gl.constexpr):
    """Write half of an output ``values`` [256, 16] as a result or partial output; the left half also writes the lse."""
    work, results, outputs = args.work, args.results, args.results.outputs
    values = values.permute((1, 0))
    LAYOUT: gl.constexpr = values.type.layout
    lse2 = gl.convert_layout(lse2, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    # An artificial dependence on the request prevents the compiler from hoisting values derived from ``row`` out of the
    # loop, where they would occupy registers.
    row = (split.item >> 31) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    continues = split.begin > 0
    if (continues == 0) & (split.end == split.steps):
        col = FIRST_COL + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
        write_out(outputs, split.item, work.group.kv_head, row, col, values, lse2, LATENT, CONFIG.out_align)
        if FIRST_COL == 0:
            write_lse(outputs, split.item, work.group.kv_head, row, lse2)
    elif results.scratch is not None:
        partial = results.scratch + schedule.partial(work, continues, CONFIG) * PARTIAL
        write_partial(partial, row, row < outputs.rows, values, lse2, FIRST_COL)


@gluon.jit
def consume(args, CONFIG: gl.constexpr):
    for number in gl.static_range(4):
        barriers.arrive(TILE_EMPTY + number, TILE_BARRIER_THREADS)
    k0, k1 = args.tiles.k0, args.tiles.k1
    token = gl.arange(0, ROWS, _ROWS) // args.query.heads
    cta_range = args.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, args.key_lengths)
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, args.work, CONFIG)
        cost += CONFIG.overhead + split.steps
        if split.end > split.begin:
            scale = load_queries(args, item, CONFIG) * args.scale
            request = FewRowsRequest(split, scale, gl.minimum(length - args.causal_offset + token, length))
            state = _empty_state()
            for step in range(split.begin, split.end):
                zero = steps_taken >> 30
                state = _attend(state, args, request, k0, 2 * step, zero, 0, CONFIG)
                state = _attend(state, args, request, k1, 2 * step + 1, zero, 2, CONFIG)
                steps_taken += 1
            row_sum = gl.sum(state.sums, 0)
            factor = (inverse(row_sum) * args.results.k_scale)[None, :]
            lse2 = lse2_of(state.row_max, row_sum)
            _write_half(state.left * factor, lse2, split, args, 0, CONFIG)
            _write_half(state.right * factor, lse2, split, args, HALF, CONFIG)
        length = device.key_count(item + 1, args.key_lengths)
