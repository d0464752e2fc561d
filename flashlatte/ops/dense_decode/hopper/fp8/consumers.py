"""The two consumers: each computes the scores of one block of a step, and half of the columns of the transposed output.

```
                time →
even consumer   scores 0 | softmax 0 | + block 1 of the previous step | + block 0 | scores 0 of the next step …
odd consumer    scores 1 | softmax 1 | + block 0 | + block 1 | scores 1 of the next step …
```

The even consumer adds block 1 a step late, so it never waits for the odd one's softmax. row_max goes even → odd → even
once a step, before P is computed.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

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
from flashlatte.kernels.hopper.mla_tiles import COPY, HALF, KEYS, LATENT, ROWS
from flashlatte.kernels.hopper.ptx.approximate import exp2
from flashlatte.kernels.hopper.ptx.e4m3_values import load_columns, rescale_columns, thread_address
from flashlatte.kernels.hopper.ptx.threads import ballot_negative
from flashlatte.kernels.hopper.softmax import NO_SCORE
from flashlatte.kernels.hopper.word_layouts import as_words
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.fp8 import epilogue, queries
from flashlatte.ops.dense_decode.hopper.fp8.tiles import (
    P0_FULL,
    P1_FULL,
    REQUEST,
    ROW_MAX0_FULL,
    ROW_MAX1_FULL,
    SCORE_COLS,
    SCORE_ROWS,
    SCORES,
    SLOT_EMPTY,
    SLOTS,
    VALUES,
    latent_of,
    rope_of,
)
from flashlatte.ops.dense_decode.hopper.tiles import STEP_KEYS
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.split_kv import device

# Bytes of a block's latents.
_BLOCK_BYTES = gl.constexpr(KEYS.value * LATENT.value)


class Fp8Request(NamedTuple):
    """The current request.

    Attributes:
        split: ``schedule.DenseDecodeSplit``.
        factor: [64], of the scores of each row: softmax_scale · log2(e) and the scales of q and keys.
        seen_by_all: number of keys that are visible to every row, if their pages are in the cache.
        seen: [64], number of visible keys of each row.
    """

    split: Any
    factor: Any
    seen_by_all: Any
    seen: Any


class Fp8State(NamedTuple):
    """A consumer's unnormalized output, four tiles [64 columns, 64 rows]; row_max [64] and row_sum [64] of its
    blocks."""

    out: Any
    row_max: Any
    row_sum: Any


@gluon.jit
def _scores(tiles, slot, zero, HAS_ROPE: gl.constexpr):
    """Scores [64, 64] of a block, in units of both scales. ``zero``: 0, opaque to the compiler
    (``mla_tiles.MlaTiles``)."""
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    k = latent_of(tiles.k, slot).permute((1, 0))
    scores = warpgroup_mma(latent_of(tiles.q, zero), k, scores, use_acc=False, is_async=True)
    if HAS_ROPE:
        k_rope = rope_of(tiles.k, slot).permute((1, 0))
        scores = warpgroup_mma(rope_of(tiles.q, zero), k_rope, scores, is_async=True)
        scores = warpgroup_mma(rope_of(tiles.q, zero + 1), k_rope, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _zero_rows(tile, first):
    """Zero the rows of a tile of pairs [64, 256] from row ``first`` on."""
    words = as_words(tile)  # [64, 128]
    row = gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    for word in gl.static_range(0, 128, 64):
        part = words.slice(word, 64, dim=1)
        part.store(gl.where((row < first)[:, None], part.load(COPY), 0))


@gluon.jit
def _apply_mask(scores, request, page, first_key, latent, CONFIG: gl.constexpr):
    """Scores [64, 64] of the block at ``first_key``, with -inf for masked keys. ``page``: page of the block, or of each
    of its boxes, from ``schedule.page_of``.

    Values beyond a request's end are set to 0, because they may be NaN, and 0 · NaN is NaN.
    """
    absent = page < 0
    if CONFIG.box < KEYS:
        absent_boxes = ballot_negative(page)
        absent = absent_boxes != 0
    if (first_key + KEYS > request.seen_by_all) | absent:
        key = first_key + gl.arange(0, KEYS, SCORE_COLS)
        seen = request.seen
        if CONFIG.box < KEYS:
            box = gl.arange(0, KEYS, SCORE_COLS) // CONFIG.box
            key = gl.where((absent_boxes >> box) & 1 == 0, key, 2**31 - 1)
        else:
            seen = gl.where(absent, 0, seen)
        scores = gl.where(key[None, :] < seen[:, None], scores, float("-inf"))
        if first_key + KEYS > request.split.length:
            _zero_rows(latent, request.split.length - first_key)
            # Other threads read the values.
            cta_barrier()
    return scores


@gluon.jit
def _raise_row_max(row_max, scores, factor):
    block_max = gl.max(scores, 1) * factor
    return gl.where(block_max - row_max > epilogue.MARGIN, block_max, row_max)


@gluon.jit
def _publish_p(p, target):
    """Store P [64 rows, 64 keys] in the order of ``ptx.e4m3_values``."""
    p = p.reshape([ROWS, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, KEYS])
    target.store(p.to(gl.float8e4nv))
    fence_async_shared()
    cta_barrier()


@gluon.jit
def _load_values(address, slot):
    """A consumer's columns of a block's values, transposed: four operands [64 columns, 64 keys]."""
    of_slot = address + slot * _BLOCK_BYTES
    return (
        load_columns(of_slot, 0, VALUES),
        load_columns(of_slot, 1, VALUES),
        load_columns(of_slot, 2, VALUES),
        load_columns(of_slot, 3, VALUES),
    )


@gluon.jit
def _add_block(out, values, tiles, slot):
    """``out`` times alpha, plus the values of a block times its P; release the slot."""
    out = rescale_columns(out, tiles.alpha.index(slot).load(SCORE_COLS))
    p = tiles.p.index(slot).permute((1, 0))
    out0 = warpgroup_mma(values[0], p, out[0], is_async=True)
    out1 = warpgroup_mma(values[1], p, out[1], is_async=True)
    out2 = warpgroup_mma(values[2], p, out[2], is_async=True)
    out3 = warpgroup_mma(values[3], p, out[3], is_async=True)
    out = warpgroup_mma_wait(0, deps=[out0, out1, out2, out3])
    barriers.arrive_at(SLOT_EMPTY + slot, barriers.ALL_THREADS)
    return out


@gluon.jit
def _begin_step(args, request, step, steps_taken, NUMBER: gl.constexpr, CONFIG: gl.constexpr):
    """Masked scores [64, 64] of block NUMBER of a step, and its slot."""
    tiles = args.tiles
    slot = (steps_taken & 1) * 2 + NUMBER
    page = schedule.page_of(args.table, request.split, 2 * step + NUMBER, CONFIG)
    mbarrier.wait(tiles.full.index(slot), (steps_taken >> 1) & 1)
    scores = _scores(tiles, slot, steps_taken >> 30, CONFIG.has_rope)
    first_key = step * STEP_KEYS + NUMBER * KEYS
    return _apply_mask(scores, request, page, first_key, tiles.k.latent.index(slot), CONFIG), slot


@gluon.jit
def _even_step(state, args, request, address, step, steps_taken, CONFIG: gl.constexpr):
    """A step, which adds block 1 of the previous step and block 0."""
    tiles = args.tiles
    scores, slot = _begin_step(args, request, step, steps_taken, 0, CONFIG)
    previous = (slot ^ 2) + 1
    is_first = step == request.split.begin
    row_max = state.row_max
    if not is_first:
        barriers.wait(ROW_MAX1_FULL, barriers.PAIR_THREADS)
        row_max = tiles.row_max.index(previous).load(SCORE_ROWS)
    row_max0 = _raise_row_max(row_max, scores, request.factor)
    tiles.row_max.index(slot).store(row_max0)
    tiles.alpha.index(slot).store(exp2(row_max - row_max0))
    barriers.arrive(ROW_MAX0_FULL, barriers.PAIR_THREADS)
    p = exp2(scores * request.factor[:, None] - (row_max0 - epilogue.OFFSET)[:, None])
    row_sum = state.row_sum * exp2(state.row_max - row_max0) + gl.sum(p, 1)
    _publish_p(p, tiles.p.index(slot))
    barriers.arrive_at(P0_FULL + (steps_taken & 1), barriers.PAIR_THREADS)
    out = state.out
    if not is_first:
        values = _load_values(address, previous)
        barriers.wait_at(P1_FULL + ((steps_taken & 1) ^ 1), barriers.PAIR_THREADS)
        out = _add_block(out, values, tiles, previous)
    out = _add_block(out, _load_values(address, slot), tiles, slot)
    return Fp8State(out, row_max0, row_sum)


@gluon.jit
def _finish_even(state, args, address, steps_taken):
    """Add block 1 of the last step."""
    tiles = args.tiles
    last = ((steps_taken - 1) & 1) * 2 + 1
    barriers.wait(ROW_MAX1_FULL, barriers.PAIR_THREADS)
    row_max1 = tiles.row_max.index(last).load(SCORE_ROWS)
    tiles.row_sum0.store(state.row_sum * exp2(state.row_max - row_max1))
    values = _load_values(address, last)
    barriers.wait_at(P1_FULL + ((steps_taken - 1) & 1), barriers.PAIR_THREADS)
    return _add_block(state.out, values, tiles, last)


@gluon.jit
def _odd_step(state, args, request, address, step, steps_taken, CONFIG: gl.constexpr):
    """A step, which adds both of its blocks."""
    tiles = args.tiles
    scores, slot = _begin_step(args, request, step, steps_taken, 1, CONFIG)
    barriers.wait(ROW_MAX0_FULL, barriers.PAIR_THREADS)
    row_max0 = tiles.row_max.index(slot - 1).load(SCORE_ROWS)
    row_max1 = _raise_row_max(row_max0, scores, request.factor)
    tiles.row_max.index(slot).store(row_max1)
    tiles.alpha.index(slot).store(exp2(row_max0 - row_max1))
    barriers.arrive(ROW_MAX1_FULL, barriers.PAIR_THREADS)
    p = exp2(scores * request.factor[:, None] - (row_max1 - epilogue.OFFSET)[:, None])
    row_sum = state.row_sum * exp2(state.row_max - row_max1) + gl.sum(p, 1)
    _publish_p(p, tiles.p.index(slot))
    barriers.arrive_at(P1_FULL + (steps_taken & 1), barriers.PAIR_THREADS)
    values = _load_values(address, slot - 1)
    barriers.wait_at(P0_FULL + (steps_taken & 1), barriers.PAIR_THREADS)
    out = _add_block(state.out, values, tiles, slot - 1)
    out = _add_block(out, _load_values(address, slot), tiles, slot)
    return Fp8State(out, row_max1, row_sum)


@gluon.jit
def _empty_state():
    zeros = gl.zeros([64, ROWS], gl.float32, SCORES)
    return Fp8State(
        (zeros, zeros, zeros, zeros),
        gl.full([ROWS], NO_SCORE, gl.float32, SCORE_ROWS),
        gl.zeros([ROWS], gl.float32, SCORE_ROWS),
    )


@gluon.jit
def _consume(args, ODD: gl.constexpr, CONFIG: gl.constexpr):
    for slot in gl.static_range(SLOTS):
        barriers.arrive(SLOT_EMPTY + slot, barriers.ALL_THREADS)
    tiles = args.tiles
    address = thread_address(tiles.k_offset + ODD * (HALF * KEYS))
    token = (args.work.group.first_row + gl.arange(0, ROWS, SCORE_ROWS)) // args.query.heads
    cta_range = args.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, args.key_lengths)
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, args.work, CONFIG)
        cost += CONFIG.overhead + split.steps
        begin, end = split.begin, split.end
        # See ``loader.load``.
        if end > begin:
            factor = queries.quantize(args, item, ODD, CONFIG)
            seen_by_all = length - args.causal_offset
            request = Fp8Request(split, factor, seen_by_all, gl.minimum(seen_by_all + token, length))
            state = _empty_state()
            for step in range(begin, end):
                if ODD:
                    state = _odd_step(state, args, request, address, step, steps_taken, CONFIG)
                else:
                    state = _even_step(state, args, request, address, step, steps_taken, CONFIG)
                steps_taken += 1
            out = state.out
            if ODD:
                tiles.row_sum1.store(state.row_sum)
            else:
                out = _finish_even(state, args, address, steps_taken)
            # The row sums are stored, and the queries may be overwritten.
            barriers.wait(REQUEST, barriers.PAIR_THREADS)
            epilogue.write(out, split, args, ((steps_taken - 1) & 1) * 2 + 1, ODD, CONFIG)
        length = device.key_count(item + 1, args.key_lengths)


@gluon.jit
def consume_even(args, CONFIG: gl.constexpr):
    _consume(args, 0, CONFIG)


@gluon.jit
def consume_odd(args, CONFIG: gl.constexpr):
    _consume(args, 1, CONFIG)
