"""The two consumers of sparse prefill: each computes half of the output's columns, and the scores of one block of a
step.

Products of a step on the tensor cores (0L: P of block 0 times the left half of its values):

    even consumer   | scores 0 |  0L  |  1L  | scores 0 of the next step ...
    odd consumer    |     scores 1     |  0R  |  1R  | scores 1 of the next step ...

The even consumer's step is that of ``mla_pipeline``. The odd consumer differs: it publishes P of block 1 before its
product with block 0, which the decode kernels issue after the scores. Here the tensor cores are always busy, and
issuing the product early costs 3% of a step's cycles (docs/notes/sparse-prefill.md).
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper.barriers import ALL_THREADS, PAIR_THREADS, arrive, wait
from flashlatte.kernels.hopper.mla_pipeline import attend_even, empty_state
from flashlatte.kernels.hopper.mla_tiles import (
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    OUTPUT,
    P0_FULL,
    P1_FULL,
    ROW_MAX1_FULL,
    ROWS,
    SCORE_ROWS,
    SCORES,
)
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.softmax import NO_SCORE, ConsumerState, probabilities, raise_row_max, rescale
from flashlatte.ops.sparse_prefill.hopper.epilogue import start_store_out, store_statistics
from flashlatte.ops.sparse_prefill.hopper.scores import (
    add_right_scores,
    finish_scores,
    hold_queries,
    start_left_scores,
    start_scores,
)
from flashlatte.ops.sparse_prefill.hopper.state import Q_EMPTY, num_selected, num_steps

_P_OPERAND = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))
# Threads of the producer.
_PRODUCER = gl.constexpr(128)


class SparsePrefillArgs(NamedTuple):
    """Arguments of the consumers that are the same for all tiles of a CTA.

    Attributes:
        tiles, shared: shared memory.
        scale: softmax_scale · log2(e).
        peer: None, for ``mla_pipeline``.
        work: the selection (``state.SparsePrefillWork``).
        output: results (``epilogue.SparsePrefillOutput``).
    """

    tiles: Any
    shared: Any
    scale: Any
    peer: Any
    work: Any
    output: Any


@gluon.jit
def _no_score():
    return gl.full([ROWS], NO_SCORE, gl.float32, SCORE_ROWS)


@gluon.jit
def _even_step(state, score_max, scores, args, step, LAST: gl.constexpr):
    """A step, given the scores of block 0. ``score_max`` [64]: maximum of the unscaled scores of this consumer's
    blocks."""
    score_max = gl.maximum(score_max, gl.max(scores, 1))
    if LAST:
        args.shared.score_max0.store(score_max)
    return attend_even(scores, state, args, step >> 30, _PRODUCER, False, LAST), score_max


@gluon.jit
def _odd_step(
    state,
    score_max,
    q_held,
    args,
    step,
    unused,
    HEAD_DIM: gl.constexpr,
    GROUP: gl.constexpr,
    LAST: gl.constexpr,
):
    """A step, including the scores of block 1. With LAST, the right half of block 1 is not released."""
    zero = step >> 30
    tiles, shared = args.tiles, args.shared
    k1_right = tiles.k1.right.index(zero)
    pending = start_scores(tiles.q, q_held, tiles.k1, shared.full1, step & 1, zero, unused, HEAD_DIM)
    scores = finish_scores(pending, shared.mask1, shared.full1, step & 1, GROUP)
    if LAST:
        arrive(Q_EMPTY, ALL_THREADS)
    score_max = gl.maximum(score_max, gl.max(scores, 1))
    wait(P0_FULL, PAIR_THREADS)
    row_max0 = tiles.row_max0.load(SCORE_ROWS)
    row_max1 = raise_row_max(row_max0, scores, args.scale)
    tiles.row_max1.store(row_max1)
    arrive(ROW_MAX1_FULL, PAIR_THREADS)
    alpha0 = gl.exp2(state.row_max - row_max0)
    alpha1 = gl.exp2(row_max0 - row_max1)
    p = probabilities(scores, row_max1, args.scale)
    p_rounded = p.to(k1_right.dtype)
    tiles.p1.index(zero).store(p_rounded)
    if LAST:
        tiles.row_sum1.store(state.row_sum * alpha0 * alpha1 + gl.sum(p, 1))
    fence_async_shared()
    arrive(P1_FULL, PAIR_THREADS)

    out = warpgroup_mma(tiles.p0.index(zero), tiles.k0.right.index(zero), rescale(state.out, alpha0), is_async=True)
    row_sum = state.row_sum * alpha0 * alpha1 + gl.sum(p, 1)
    if LAST:
        row_sum += tiles.row_sum0.load(SCORE_ROWS) * alpha1
        score_max = gl.maximum(score_max, shared.score_max0.load(SCORE_ROWS))
    out = warpgroup_mma_wait(0, deps=[out])
    arrive(K0_RIGHT_EMPTY, PAIR_THREADS)

    out = warpgroup_mma(gl.convert_layout(p_rounded, _P_OPERAND), k1_right, rescale(out, alpha1), is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    if not LAST:
        arrive(K1_RIGHT_EMPTY, PAIR_THREADS)
    return ConsumerState(out, row_max1, row_sum), score_max


@gluon.jit
def consume_even(args, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    arrive(K0_LEFT_EMPTY, PAIR_THREADS)
    arrive(K1_LEFT_EMPTY, PAIR_THREADS)
    arrive(Q_EMPTY, ALL_THREADS)
    tiles, shared, work = args.tiles, args.shared, args.work
    q, k0 = tiles.q, tiles.k0
    unused = gl.zeros([64, 64], gl.float32, SCORES)
    step = 0  # over all tiles: its parity is the phase of the blocks' barriers
    q_phase = 0
    first = gl.program_id(0)
    steps = num_steps(num_selected(work, first))

    mbarrier.wait(shared.q_full, q_phase)
    q_held = hold_queries(q, 0, HEAD_DIM)
    pending = start_scores(q, q_held, k0, shared.full0, 0, 0, unused, HEAD_DIM)
    scores = finish_scores(pending, shared.mask0, shared.full0, 0, GROUP)
    for tile in range(first, work.tiles, gl.num_programs(0)):
        next_steps = num_steps(num_selected(work, tile + gl.num_programs(0)))
        state = empty_state(OUTPUT)
        score_max = _no_score()
        for _ in range(opaque(steps) - 1):
            state, score_max = _even_step(state, score_max, scores, args, step, False)
            step += 1
            pending = start_scores(q, q_held, k0, shared.full0, step & 1, step >> 30, unused, HEAD_DIM)
            scores = finish_scores(pending, shared.mask0, shared.full0, step & 1, GROUP)

        arrive(Q_EMPTY, ALL_THREADS)
        state, score_max = _even_step(state, score_max, scores, args, step, True)
        step += 1
        q_phase ^= 1
        start_store_out(
            args.output, state, work, tile, tiles.k1.left.index(step >> 30), shared.k1_offsets.left, 0, GROUP
        )
        # The next tile's first scores overlap with the store of this tile's output. Block 1 is released before they
        # wait for the rest of block 0, so that both blocks are loaded at the same time.
        mbarrier.wait(shared.q_full, q_phase)
        q_held = hold_queries(q, step >> 30, HEAD_DIM)
        pending = start_left_scores(q, k0, shared.full0, step & 1, step >> 30, unused)
        tma.store_wait(0)
        arrive(K1_LEFT_EMPTY, PAIR_THREADS)
        pending = add_right_scores(pending, q, q_held, k0, shared.full0, step & 1, step >> 30, HEAD_DIM)
        scores = finish_scores(pending, shared.mask0, shared.full0, step & 1, GROUP)
        steps = next_steps


@gluon.jit
def consume_odd(args, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    arrive(K0_RIGHT_EMPTY, PAIR_THREADS)
    arrive(K1_RIGHT_EMPTY, PAIR_THREADS)
    arrive(Q_EMPTY, ALL_THREADS)
    tiles, shared, work = args.tiles, args.shared, args.work
    unused = gl.zeros([64, 64], gl.float32, SCORES)
    step = 0
    q_phase = 0
    first = gl.program_id(0)
    steps = num_steps(num_selected(work, first))
    for tile in range(first, work.tiles, gl.num_programs(0)):
        next_steps = num_steps(num_selected(work, tile + gl.num_programs(0)))
        mbarrier.wait(shared.q_full, q_phase)
        q_phase ^= 1
        q_held = hold_queries(tiles.q, step >> 30, HEAD_DIM)
        state = empty_state(OUTPUT)
        score_max = _no_score()
        for _ in range(opaque(steps) - 1):
            state, score_max = _odd_step(state, score_max, q_held, args, step, unused, HEAD_DIM, GROUP, False)
            step += 1
        state, score_max = _odd_step(state, score_max, q_held, args, step, unused, HEAD_DIM, GROUP, True)
        step += 1
        start_store_out(
            args.output, state, work, tile, tiles.k1.right.index(step >> 30), shared.k1_offsets.right, 1, GROUP
        )
        store_statistics(args.output, state, score_max, work, tile, GROUP)
        tma.store_wait(0)
        arrive(K1_RIGHT_EMPTY, PAIR_THREADS)
        steps = next_steps
