"""The two consumers: for each request, its quantized queries, the masked steps, and its results."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.e4m3 import steps
from flashlatte.kernels.hopper.e4m3.tiles import ROW_MAX1_FULL, SCORE_ROWS, SLOT_EMPTY, SLOTS, TILE
from flashlatte.kernels.hopper.mla_tiles import COPY, HALF, KEYS, ROWS
from flashlatte.kernels.hopper.ptx.e4m3_values import thread_address
from flashlatte.kernels.hopper.ptx.registers import exp2
from flashlatte.kernels.hopper.word_layouts import as_words
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.consumers import absent_boxes, mask_scores
from flashlatte.ops.dense_decode.hopper.fp8 import epilogue, queries
from flashlatte.ops.dense_decode.hopper.tiles import STEP_KEYS
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.split_kv import device


class Fp8Request(NamedTuple):
    """The current request.

    Attributes:
        split: ``schedule.DenseDecodeSplit``.
        factor: [64], of the scores of each row: softmax_scale · log2(e) and the scales of q and keys.
        visible_to_all: number of keys that are visible to every row, if their pages are in the cache.
        visible: [64], number of visible keys of each row.
    """

    split: Any
    factor: Any
    visible_to_all: Any
    visible: Any


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
    """Scores [64, 64] of the block at ``first_key``, with -inf for masked keys. ``page``: from ``schedule.page_of``.

    Values beyond a request's end are set to 0, because they may be NaN, and 0 · NaN is NaN.
    """
    absent = absent_boxes(page, CONFIG)
    any_absent = absent != 0
    if (first_key + KEYS > request.visible_to_all) | any_absent:
        scores = mask_scores(scores, request.visible, absent, first_key, CONFIG)
        if first_key + KEYS > request.split.length:
            _zero_rows(latent, request.split.length - first_key)
            # Other threads read the values.
            cta_barrier()
    return scores


@gluon.jit
def _begin_step(args, request, step, steps_taken, NUMBER: gl.constexpr, CONFIG: gl.constexpr):
    """Masked scores [64, 64] of block NUMBER of a step."""
    tiles = args.tiles
    slot = steps.slot_of(steps_taken, NUMBER)
    page = schedule.page_of(args.table, request.split, 2 * step + NUMBER, CONFIG)
    mbarrier.wait(tiles.full.index(slot), (steps_taken >> 1) & 1)
    scores = steps.compute_scores(tiles, slot, steps_taken >> 30, CONFIG.has_rope)
    first_key = step * STEP_KEYS + NUMBER * KEYS
    return _apply_mask(scores, request, page, first_key, tiles.k.latent.index(slot), CONFIG)


@gluon.jit
def consume(args, ODD: gl.constexpr, CONFIG: gl.constexpr):
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
        # See ``producer.load_in_order``.
        if end > begin:
            factor = queries.quantize(args, item, ODD, CONFIG)
            visible_to_all = length - args.causal_offset
            request = Fp8Request(split, factor, visible_to_all, gl.minimum(visible_to_all + token, length))
            state = steps.empty_state()
            for step in range(begin, end):
                scores = _begin_step(args, request, step, steps_taken, ODD, CONFIG)
                state = steps.take_step(state, scores, tiles, factor, address, step == begin, True, steps_taken, ODD)
                steps_taken += 1
            if ODD:
                tiles.row_sum1.store(state.row_sum)
            else:
                barriers.wait(ROW_MAX1_FULL, barriers.PAIR_THREADS)
                row_max1 = tiles.row_max.index(steps.slot_of(steps_taken - 1, 1)).load(SCORE_ROWS)
                tiles.row_sum0.store(state.row_sum * exp2(state.row_max - row_max1))
            # The row sums are stored, and the queries may be overwritten.
            barriers.wait(TILE, barriers.PAIR_THREADS)
            epilogue.write(state.out, split, args, steps.slot_of(steps_taken - 1, 1), ODD, CONFIG)
        length = device.key_count(item + 1, args.key_lengths)
