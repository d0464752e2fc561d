"""The two consumers of dense decode: scores of a block of keys, masking, and the loop over the CTA's requests.

``mla_pipeline`` computes the output from the scores.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
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
from flashlatte.kernels.hopper.mla_pipeline import add_row_sums, attend_even, attend_odd, begin_odd, empty_state
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
    SCORE_ROWS,
    SCORES,
    SWIZZLED,
)
from flashlatte.kernels.hopper.ptx.threads import ballot_negative
from flashlatte.ops.dense_decode.hopper import epilogue, schedule
from flashlatte.ops.dense_decode.hopper.tiles import Q_EMPTY, Q_ROPE_EMPTY, STEP_KEYS
from flashlatte.runtime.gluon_compat import cta_barrier, reinterpret
from flashlatte.split_kv import device

# Threads of the producer.
_PRODUCER = gl.constexpr(128)


class DenseDecodeArgs(NamedTuple):
    """Arguments of the partitions that are the same for all requests of a CTA.

    Attributes:
        query: all queries (``producer.DenseDecodeQuery``).
        query_origin: origin of the CTA's tile of queries (``producer.QueryTileOrigin``).
        keys: the cache (``producer.KeyDescriptors`` or ``one_byte_producer.OneByteKeys``).
        key_lengths: lengths of the requests (``device.KeyLengths``).
        table: pages of the requests (``rows.BlockTable``).
        work: the work of the CTA (``schedule.DenseDecodeWork``).
        causal_offset: keys at a request's end that are masked for its first query token: s_q - 1 if causal, else 0.
        scale: softmax_scale · log2(e).
        tiles, full: shared memory.
        peer: None, for ``mla_pipeline``.
        results: outputs and scratch (``epilogue.DenseDecodeResults``).
    """

    query: Any
    query_origin: Any
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


class DecodeMask(NamedTuple):
    """The visible keys of a request's rows.

    Attributes:
        length: keys of the request.
        visible_to_all: number of keys that are visible to every row, if their pages are in the cache.
        visible: [64], number of visible keys of each row.
    """

    length: Any
    visible_to_all: Any
    visible: Any


class DecodeRequest(NamedTuple):
    """The current request: its split (``schedule.DenseDecodeSplit``), its mask (``DecodeMask``), and the rope of its
    queries in registers (without rope, any value)."""

    split: Any
    mask: Any
    q_rope: Any


@gluon.jit
def _mask_of(length, args):
    """The mask of a request with ``length`` keys."""
    token = (args.work.group.first_row + gl.arange(0, ROWS, SCORE_ROWS)) // args.query.heads
    visible_to_all = length - args.causal_offset
    return DecodeMask(length, visible_to_all, gl.minimum(visible_to_all + token, length))


@gluon.jit
def absent_boxes(page, CONFIG: gl.constexpr):
    """Bits of the boxes of a block whose page is not in the cache. ``page``: page of the block, or of each of its
    boxes, from ``schedule.page_of``."""
    return ballot_negative(page) if CONFIG.box < KEYS else page < 0


@gluon.jit
def mask_scores(scores, visible, absent, first_key, CONFIG: gl.constexpr):
    """Scores [64, 64] of the block at ``first_key``, with -inf for keys from ``visible`` [64] on and in ``absent``
    boxes."""
    COLS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    key = first_key + gl.arange(0, KEYS, COLS)
    if CONFIG.box < KEYS:
        box = gl.arange(0, KEYS, COLS) // CONFIG.box
        key = gl.where((absent >> box) & 1 == 0, key, 2**31 - 1)
    else:
        visible = gl.where(absent, 0, visible)
    return gl.where(key[None, :] < visible[:, None], scores, float("-inf"))


@gluon.jit
def _apply_mask(scores, mask, page, first_key, left, right, zero, CONFIG: gl.constexpr):
    """Scores [64, 64] of the block at ``first_key``, with -inf for masked keys. ``page``: from ``schedule.page_of``.

    Values beyond a request's end are set to 0, because they may be NaN, and 0 · NaN is NaN.
    """
    absent = absent_boxes(page, CONFIG)
    any_absent = absent != 0
    if (first_key + KEYS > mask.visible_to_all) | any_absent:
        scores = mask_scores(scores, mask.visible, absent, first_key, CONFIG)
        # The one-byte producer stores zeros there.
        if not CONFIG.one_byte:  # noqa: SIM102
            if first_key + KEYS > mask.length:
                _zero_rows(left, right, mask.length - first_key, zero)
                fence_async_shared()
                cta_barrier()
    return scores


@gluon.jit
def _zero_rows(left, right, first, zero):
    """Zero the rows of two tiles [64, 256] from row ``first`` on. ``zero`` is 0, but the compiler does not know that.

    Unrolled, this loop was a quarter of the kernel's code: one request of 4,110 keys took 1.13 times as long if its
    instructions had to be fetched from memory, as in a model.
    """
    row = gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    left = reinterpret(left, left.dtype, [HALF // 64, KEYS, 64], SWIZZLED)
    right = reinterpret(right, right.dtype, [HALF // 64, KEYS, 64], SWIZZLED)
    for cols in range(HALF // 64 + zero):
        left_part, right_part = left.index(cols), right.index(cols)  # [64, 64]
        left_values, right_values = left_part.load(COPY), right_part.load(COPY)
        left_part.store(gl.where((row < first)[:, None], left_values, 0.0).to(left_values.dtype))
        right_part.store(gl.where((row < first)[:, None], right_values, 0.0).to(right_values.dtype))


@gluon.jit
def _begin_scores(args, request, k, full, phase, zero, scores, CONFIG: gl.constexpr):
    """Start the scores [64, 64] of a block: the product with each half is issued as soon as the half has arrived.
    ``scores``: registers for the result.

    The left half comes first, because the even consumer releases it before the odd one has finished with the right
    half.
    """
    q = args.tiles.q
    q_left, k_left = q.left.index(zero), k.left.index(zero)
    mbarrier.wait(full.left, phase)
    if CONFIG.one_byte:
        fence_async_shared()
    scores = warpgroup_mma(q_left, k_left.permute((1, 0)), scores, use_acc=False, is_async=True)
    q_right, k_right, k_rope = q.right.index(zero), k.right.index(zero), k.rope.index(zero)
    mbarrier.wait(full.right, phase)
    if CONFIG.one_byte:
        fence_async_shared()
    scores = warpgroup_mma(q_right, k_right.permute((1, 0)), scores, is_async=True)
    if CONFIG.has_rope:
        q_rope = request.q_rope
        if CONFIG.one_byte:
            q_rope = q.rope.index(zero)
        scores = warpgroup_mma(q_rope, k_rope.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _score0(args, request, page, block, phase, zero, scores, CONFIG: gl.constexpr):
    """Scores of block 0 and its page. With one-byte keys the page is loaded here, because the fences would wait for an
    earlier load."""
    scores = _begin_scores(args, request, args.tiles.k0, args.full.k0, phase, zero, scores, CONFIG)
    if CONFIG.one_byte:
        page = schedule.page_of(args.table, request.split, block, CONFIG)
    return warpgroup_mma_wait(0, deps=[scores]), page


@gluon.jit
def _take_queries(args, split, mask, phase, CONFIG: gl.constexpr):
    """Wait for the queries of a request and load their rope into registers (``tiles.allocate``)."""
    mbarrier.wait(args.full.q, phase)
    if CONFIG.has_rope and not CONFIG.one_byte:
        return DecodeRequest(split, mask, args.tiles.q.rope.index(0).load(Q_OPERAND))
    else:
        return DecodeRequest(split, mask, args.tiles.q.rope)


@gluon.jit
def _even_step(scores, state, args, request, page, step, steps_taken, CONFIG: gl.constexpr, LAST: gl.constexpr):
    """A step from the scores of block 0 to the scores and page of the next step's block 0, which are skipped with
    LAST."""
    k0 = args.tiles.k0
    phase, zero = steps_taken & 1, steps_taken >> 30
    left, right = k0.left.index(zero), k0.right.index(zero)
    scores = _apply_mask(scores, request.mask, page, step * STEP_KEYS, left, right, zero, CONFIG)
    state = attend_even(scores, state, args, zero, _PRODUCER, CONFIG.one_byte)
    if not LAST:
        if not CONFIG.one_byte:
            # Not loaded earlier: the fences of the step would wait for it.
            page = schedule.page_of(args.table, request.split, 2 * step + 2, CONFIG)
        scores, page = _score0(args, request, page, 2 * step + 2, phase ^ 1, zero, scores, CONFIG)
    return scores, page, state


@gluon.jit
def _odd_step(state, args, request, page, step, steps_taken, CONFIG: gl.constexpr, LAST: gl.constexpr):
    """A whole step, and the load of the next step's page, which is skipped with LAST."""
    k1 = args.tiles.k1
    phase, zero = steps_taken & 1, steps_taken >> 30
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _begin_scores(args, request, k1, args.full.k1, phase, zero, scores, CONFIG)
    if CONFIG.one_byte:
        page = schedule.page_of(args.table, request.split, 2 * step + 1, CONFIG)
    out, row_max0 = begin_odd(state, args, zero)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if LAST:
        barriers.arrive(Q_EMPTY, barriers.ALL_THREADS)
    first_key = step * STEP_KEYS + KEYS
    scores = _apply_mask(scores, request.mask, page, first_key, k1.left.index(zero), k1.right.index(zero), zero, CONFIG)
    state = attend_odd(scores, out, row_max0, state, args, zero, _PRODUCER, CONFIG.one_byte)
    if not LAST and not CONFIG.one_byte:
        page = schedule.page_of(args.table, request.split, 2 * step + 3, CONFIG)
    return page, state


@gluon.jit
def consume_even(args, CONFIG: gl.constexpr):
    barriers.arrive(Q_EMPTY, barriers.ALL_THREADS)
    barriers.arrive(K0_LEFT_EMPTY, barriers.PAIR_THREADS)
    barriers.arrive(K1_LEFT_EMPTY, barriers.PAIR_THREADS)
    tiles = args.tiles
    cta_range = args.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, args.key_lengths)
    items_taken = 0
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, args.work, CONFIG)
        mask = _mask_of(length, args)
        cost += CONFIG.overhead + split.steps
        length = device.key_count(item + 1, args.key_lengths)
        begin, end = split.begin, split.end
        if end > begin:
            page = schedule.page_of(args.table, split, 2 * begin, CONFIG)
            state = empty_state(OUTPUT)
            scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
            phase, zero = steps_taken & 1, steps_taken >> 30
            request = _take_queries(args, split, mask, items_taken & 1, CONFIG)
            scores, page = _score0(args, request, page, 2 * begin, phase, zero, scores, CONFIG)
            if CONFIG.has_rope and not CONFIG.one_byte:
                barriers.wait(Q_ROPE_EMPTY, barriers.PAIR_THREADS)
            for step in range(begin, end - 1):
                scores, page, state = _even_step(scores, state, args, request, page, step, steps_taken, CONFIG, False)
                steps_taken += 1
            barriers.arrive(Q_EMPTY, barriers.ALL_THREADS)
            scores, page, state = _even_step(scores, state, args, request, page, end - 1, steps_taken, CONFIG, True)
            steps_taken += 1
            items_taken += 1
            state = add_row_sums(state, tiles.row_sum0, tiles.row_sum1)
            epilogue.write(state, split, args, 0, CONFIG)


@gluon.jit
def consume_odd(args, CONFIG: gl.constexpr):
    barriers.arrive(Q_EMPTY, barriers.ALL_THREADS)
    barriers.arrive(K0_RIGHT_EMPTY, barriers.PAIR_THREADS)
    barriers.arrive(K1_RIGHT_EMPTY, barriers.PAIR_THREADS)
    tiles = args.tiles
    cta_range = args.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, args.key_lengths)
    items_taken = 0
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, args.work, CONFIG)
        mask = _mask_of(length, args)
        cost += CONFIG.overhead + split.steps
        length = device.key_count(item + 1, args.key_lengths)
        begin, end = split.begin, split.end
        if end > begin:
            page = schedule.page_of(args.table, split, 2 * begin + 1, CONFIG)
            state = empty_state(OUTPUT)
            request = _take_queries(args, split, mask, items_taken & 1, CONFIG)
            if CONFIG.has_rope and not CONFIG.one_byte:
                barriers.arrive(Q_ROPE_EMPTY, barriers.PAIR_THREADS)
            for step in range(begin, end - 1):
                page, state = _odd_step(state, args, request, page, step, steps_taken, CONFIG, False)
                steps_taken += 1
            page, state = _odd_step(state, args, request, page, end - 1, steps_taken, CONFIG, True)
            steps_taken += 1
            items_taken += 1
            state = add_row_sums(state, tiles.row_sum1, tiles.row_sum0)
            epilogue.write(state, split, args, HALF, CONFIG)
