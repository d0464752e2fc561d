"""The two consumers of sparse decode: queries, scores of a block of keys, the loop over work items, and the epilogue.

``mla_pipeline`` computes the output from the scores.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper import barriers, clusters
from flashlatte.kernels.hopper.mla_pipeline import (
    add_row_sums,
    attend_even,
    attend_odd,
    begin_odd,
    empty_state,
    release,
)
from flashlatte.kernels.hopper.mla_tiles import (
    HALF,
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    KEYS,
    LEFT,
    RIGHT,
    ROWS,
    SCORE_COLS,
    SCORES,
    half_of,
)
from flashlatte.kernels.hopper.ptx import clusters as ptx_clusters
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.softmax import inverse, lse2_of
from flashlatte.kernels.hopper.vector_layout import to_vector_layout
from flashlatte.kernels.triton.online_softmax import sink_weight
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.rows import SelectedRows, copy_words, tokens_layout
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, OUTPUT, OUTPUT_ROWS, PLAIN
from flashlatte.runtime.kernel_records import OptionalInt32, Pointer
from flashlatte.split_kv import fp24_partials
from flashlatte.split_kv.gluon_device import PARTIAL, write_partial
from flashlatte.split_kv.outputs import head_pointers, write_lse


class SparseDecodeQueryRows(NamedTuple):
    """Rows of the queries, with strides in units of 16 bytes; all None if there are none."""

    start: Pointer
    stride_request: OptionalInt32
    stride_token: OptionalInt32
    stride_head: OptionalInt32


class SparseDecodeQuery(NamedTuple):
    """The queries. ``rope``: their rotated part, if ``rows`` has only the latent part; else nothing."""

    rows: SparseDecodeQueryRows
    rope: SparseDecodeQueryRows


class SparseDecodeArgs(NamedTuple):
    """Arguments of the partitions that are the same for all work items of a CTA.

    Attributes:
        query: all queries (``SparseDecodeQuery``).
        own, extra: selections from the cache and from the extra cache (``rows.CacheSelection``); None without extra
            cache.
        key_lengths: numbers of keys of the items (``device.KeyLengths``).
        work: the CTA's work items (``schedule.SparseDecodeWork``).
        scale: softmax_scale · log2(e).
        tiles, masks, full: shared memory.
        peer: addresses in a cluster (``clusters.ClusterAddresses``); None without cluster.
        outputs: results (``outputs.Outputs``).
        scratch: all partial outputs; None if no work item is split.
        partials: the partial outputs of the CTA.
    """

    query: Any
    own: Any
    extra: Any
    key_lengths: Any
    work: Any
    scale: Any
    tiles: Any
    masks: Any
    full: Any
    peer: Any
    outputs: Any
    scratch: Any
    partials: Any


@gluon.jit
def _query_rows(rows, item, head, args):
    """The rows of an item's heads."""
    tokens = args.key_lengths.tokens
    offset = (
        (item // tokens).to(gl.int64) * rows.stride_request
        + (item % tokens).to(gl.int64) * rows.stride_token
        + head.to(gl.int64) * rows.stride_head
    )
    words = rows.start.to(gl.pointer_type(gl.int32), bitcast=True) + offset * 4
    exists = head < args.outputs.heads
    return SelectedRows(words, exists, exists)


@gluon.jit
def copy_query(args, item, cost, CONFIG: gl.constexpr):
    """Start copying the queries of the item that starts at ``cost``, if the CTA has a split of it; 0 after the last
    head.

    The even consumer calls this, because it is idle at that point.
    """
    if schedule.has_split(item, cost, args.work, CONFIG):
        query = args.query
        # Opaque: values that depend on it would otherwise be hoisted out of the main loop and kept in registers.
        head = opaque(args.work.group * ROWS + gl.arange(0, ROWS, tokens_layout(False)))
        rows = _query_rows(query.rows, item, head, args)
        copy_words(args.tiles.q.left, rows, 0, 0, 128, False)
        copy_words(args.tiles.q.right, rows, 128, 0, 128, False)
        if query.rope.start is not None:
            copy_words(args.tiles.q.rope, _query_rows(query.rope, item, head, args), 0, 0, 32, False)
        elif CONFIG.has_rope:
            copy_words(args.tiles.q.rope, rows, 256, 0, 32, False)
        async_copy.mbarrier_arrive(args.full.q, increment_count=False)


@gluon.jit
def _begin(args, FIRST_EMPTY: gl.constexpr, SECOND_EMPTY: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.cluster:
        ptx_clusters.arrive()
        ptx_clusters.wait()
    else:
        release(args, FIRST_EMPTY, CONFIG.producer_threads)
        release(args, SECOND_EMPTY, CONFIG.producer_threads)


@gluon.jit
def _score_half(
    args,
    k,
    full,
    phase,
    zero,
    scores,
    SIDE: gl.constexpr,
    FULL: gl.constexpr,
    USE_ACC: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """Wait for half of a block and issue its part of the scores [64, 64]. ``full``: mbarriers of the cp.async
    copies."""
    q_half, k_half, copied = half_of(args.tiles.q, SIDE).index(zero), half_of(k, SIDE).index(zero), half_of(full, SIDE)
    if SIDE == RIGHT and CONFIG.format == MODEL1:
        # The last 64 columns are copied by cp.async.
        mbarrier.wait(copied, phase)
    barriers.wait(FULL, 128 + CONFIG.producer_threads)
    if CONFIG.cluster:
        clusters.wait(FULL, args.peer, phase)
    if CONFIG.format == PLAIN:
        mbarrier.wait(copied, phase)
    # The consumer fences instead of the producer: a fence waits for all loads of its thread, and consumers have none.
    fence_async_shared()
    return warpgroup_mma(q_half, k_half.permute((1, 0)), scores, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _score_rope(args, k, full, phase, zero, scores, CONFIG: gl.constexpr):
    if CONFIG.has_rope:
        q_rope, k_rope = args.tiles.q.rope.index(zero), k.rope.index(zero)
        if CONFIG.format != PLAIN:
            mbarrier.wait(full.right, phase)
            fence_async_shared()
        scores = warpgroup_mma(q_rope, k_rope.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def score0(args, phase, zero, CONFIG: gl.constexpr):
    """Masked scores of block 0, beginning with its left half, which becomes empty first."""
    k, full = args.tiles.k0, args.full.k0
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _score_half(args, k, full, phase, zero, scores, LEFT, tiles.K0_LEFT_FULL, False, CONFIG)
    scores = _score_half(args, k, full, phase, zero, scores, RIGHT, tiles.K0_RIGHT_FULL, True, CONFIG)
    scores = _score_rope(args, k, full, phase, zero, scores, CONFIG)
    return apply_mask(warpgroup_mma_wait(0, deps=[scores]), args.masks.block0)


@gluon.jit
def _begin_score1(args, phase, zero, CONFIG: gl.constexpr):
    """Start the scores of block 1, beginning with its right half."""
    k, full = args.tiles.k1, args.full.k1
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _score_half(args, k, full, phase, zero, scores, RIGHT, tiles.K1_RIGHT_FULL, False, CONFIG)
    scores = _score_half(args, k, full, phase, zero, scores, LEFT, tiles.K1_LEFT_FULL, True, CONFIG)
    return _score_rope(args, k, full, phase, zero, scores, CONFIG)


@gluon.jit
def apply_mask(scores, mask):
    selected = mask.load(SCORE_COLS) != 0
    return gl.where(selected[None, :], scores, float("-inf"))


@gluon.jit
def write(state, item, split, args, FIRST_COL: gl.constexpr, CONFIG: gl.constexpr):
    """Write columns from FIRST_COL of a work item's heads as a result or partial output; with FIRST_COL 0, also write
    the lse."""
    first_head = args.work.group * ROWS
    if CONFIG.equal_splits:
        rows_in_use = args.outputs.heads - first_head
        fp24_partials.write(state.out, state.row_max, state.row_sum, args.partials, rows_in_use, FIRST_COL)
    else:
        _write_normalized(state, item, split, first_head, args, FIRST_COL, CONFIG.out_align)


@gluon.jit
def _write_normalized(state, item, split, first_head, args, FIRST_COL: gl.constexpr, OUT_ALIGN: gl.constexpr):
    outputs = args.outputs
    row_sum = gl.convert_layout(state.row_sum, OUTPUT_ROWS, assert_trivial=True)
    row_max = gl.convert_layout(state.row_max, OUTPUT_ROWS, assert_trivial=True)
    factor = inverse(row_sum)
    lse2 = lse2_of(row_max, row_sum)
    # Opaque, as in ``copy_query``.
    row = opaque(gl.arange(0, ROWS, OUTPUT_ROWS))
    head = first_head + row
    if (split.begin == 0) & (split.end == split.blocks):
        if outputs.sink is not None:
            factor *= sink_weight(outputs.sink, outputs.sink_stride, head, head < outputs.heads, lse2, row_sum == 0)
        _write_out(outputs, item, first_head, state.out * factor[:, None], FIRST_COL, OUT_ALIGN)
        if FIRST_COL == 0:
            write_lse(outputs, item, 0, head, lse2)
    elif args.partials is not None:
        # A range's first partial output belongs to the item that it continues, the second one to an item that it
        # begins.
        partial = args.partials + gl.where(split.begin > 0, 0, PARTIAL)
        write_partial(partial, row, head < outputs.heads, state.out * factor[:, None], lse2, FIRST_COL)


@gluon.jit
def _write_out(outputs, item, first_head, values, FIRST_COL: gl.constexpr, OUT_ALIGN: gl.constexpr):
    values = to_vector_layout(values.to(outputs.out.dtype.element_ty))
    LAYOUT: gl.constexpr = values.type.layout
    head = first_head + opaque(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))
    col = FIRST_COL + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    pointers = head_pointers(outputs, item, head, OUT_ALIGN)[:, None] + col[None, :]
    gl.store(pointers, values, mask=(head < outputs.heads)[:, None])


@gluon.jit
def consume_even(args, CONFIG: gl.constexpr):
    _begin(args, K0_LEFT_EMPTY, K1_LEFT_EMPTY, CONFIG)
    cta_range = args.work.range
    copy_query(args, cta_range.first, cta_range.first_cost, CONFIG)
    cost = cta_range.first_cost
    items_taken = 0
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop, args.work.stride):
        split = schedule.split_of(item, cost, args.work, args.key_lengths, CONFIG)
        cost += CONFIG.overhead + split.blocks
        steps = schedule.num_steps(split)
        if steps > 0:
            state = empty_state(OUTPUT)
            mbarrier.wait(args.full.q, items_taken & 1)
            for _ in range(steps):
                zero = steps_taken >> 30
                scores = score0(args, steps_taken & 1, zero, CONFIG)
                state = attend_even(scores, state, args, zero, CONFIG.producer_threads, True)
                steps_taken += 1
            items_taken += 1
            # The current queries may be overwritten: the odd consumer has published its last P, so it no longer reads
            # them.
            copy_query(args, item + args.work.stride, cost, CONFIG)
            state = add_row_sums(state, args.tiles.row_sum0, args.tiles.row_sum1)
            write(state, item, split, args, 0, CONFIG)


@gluon.jit
def consume_odd(args, CONFIG: gl.constexpr):
    _begin(args, K0_RIGHT_EMPTY, K1_RIGHT_EMPTY, CONFIG)
    cta_range = args.work.range
    cost = cta_range.first_cost
    items_taken = 0
    steps_taken = 0
    for item in range(cta_range.first, cta_range.stop, args.work.stride):
        split = schedule.split_of(item, cost, args.work, args.key_lengths, CONFIG)
        cost += CONFIG.overhead + split.blocks
        steps = schedule.num_steps(split)
        if steps > 0:
            state = empty_state(OUTPUT)
            mbarrier.wait(args.full.q, items_taken & 1)
            for _ in range(steps):
                zero = steps_taken >> 30
                scores = _begin_score1(args, steps_taken & 1, zero, CONFIG)
                out, row_max0 = begin_odd(state, args, zero)
                scores = apply_mask(warpgroup_mma_wait(1, deps=[scores]), args.masks.block1)
                state = attend_odd(scores, out, row_max0, state, args, zero, CONFIG.producer_threads, True)
                steps_taken += 1
            items_taken += 1
            state = add_row_sums(state, args.tiles.row_sum1, args.tiles.row_sum0)
            write(state, item, split, args, HALF, CONFIG)
