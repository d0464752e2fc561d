"""The two consumers. Each owns a half of the output's columns, and the scores of one block of a pair.

A pair takes, on the tensor cores (0L: P of block 0 · the left half of its values):

    even consumer   | scores 0 |  0L  |  1L  | scores 0 of the next pair ...
    odd consumer    |     scores 1     |  0R  |  1R  | scores 1 of the next pair ...

While one consumer computes P, the other multiplies. P of block 0 reaches the odd consumer, and P of block 1 the even
one, through shared memory, with the row_max that it is relative to.

The even consumer's step is that of ``mla_pipeline``. The odd one's is not: it publishes P of block 1 before its product
with block 0, where decode's kernels queue that product behind the scores. Here the tensor cores are never without work,
and the queue costs 3% of a pair's cycles (docs/notes/sparse-prefill.md). And both keep the true maximum, for
max_logits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper.barriers import ALL, PAIR, arrive, wait
from flashlatte.kernels.hopper.mla_tiles import (
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    P0_FULL,
    P1_FULL,
    ROW_MAX1_FULL,
    SCORE_ROWS,
    SCORES,
)
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.softmax import rescale
from flashlatte.ops.sparse_prefill.hopper.epilogue import start_out, store_statistics
from flashlatte.ops.sparse_prefill.hopper.softmax import (
    P_OPERAND,
    Attention,
    add_right_scores,
    empty_attention,
    finish_scores,
    hold_queries,
    probabilities,
    raise_row_max,
    start_left_scores,
    start_scores,
)
from flashlatte.ops.sparse_prefill.hopper.state import Q_EMPTY, pairs_of


@gluon.jit
def _attend_even(attention, scores, shared, step, scale_log2, LAST: gl.constexpr):
    """A pair, from block 0's scores. After the last pair of a tile block 1's left half is not let go: out needs it."""
    opaque_zero = step >> 30
    k0_left = shared.k0.left.index(opaque_zero)
    k1_left = shared.k1.left.index(opaque_zero)

    block_max = gl.max(scores, 1)
    score_max = gl.maximum(attention.score_max, block_max)
    row_max0 = raise_row_max(attention.row_max, block_max, scale_log2)
    p = probabilities(scores, row_max0, scale_log2)
    p_rounded = p.to(k0_left.dtype)
    alpha = gl.exp2((attention.row_max - row_max0) * scale_log2)
    shared.row_max0.store(row_max0)
    shared.p0.index(opaque_zero).store(p_rounded)
    if LAST:
        shared.row_sum0.store(attention.row_sum * alpha + gl.sum(p, 1))
        shared.score_max0.store(score_max)
    fence_async_shared()
    arrive(P0_FULL, PAIR)

    pending = warpgroup_mma(
        gl.convert_layout(p_rounded, P_OPERAND), k0_left, rescale(attention.out, alpha), is_async=True
    )
    row_sum = attention.row_sum * alpha + gl.sum(p, 1)
    out = warpgroup_mma_wait(0, deps=[pending])
    arrive(K0_LEFT_EMPTY, PAIR)

    wait(ROW_MAX1_FULL, PAIR)
    row_max1 = shared.row_max1.load(SCORE_ROWS)
    alpha = gl.exp2((row_max0 - row_max1) * scale_log2)
    out = rescale(out, alpha)
    row_sum = row_sum * alpha
    wait(P1_FULL, PAIR)
    pending = warpgroup_mma(shared.p1.index(opaque_zero), k1_left, out, is_async=True)
    if LAST:
        row_sum += shared.row_sum1.load(SCORE_ROWS)
    out = warpgroup_mma_wait(0, deps=[pending])
    if not LAST:
        arrive(K1_LEFT_EMPTY, PAIR)
    return Attention(out, row_max1, row_sum, score_max)


@gluon.jit
def _attend_odd(attention, q_held, shared, step, unused, scale_log2, HEAD_DIM: gl.constexpr, LAST: gl.constexpr):
    """A pair, with block 1's scores. After the last pair of a tile block 1's right half is not let go."""
    opaque_zero = step >> 30
    k0_right = shared.k0.right.index(opaque_zero)
    k1_right = shared.k1.right.index(opaque_zero)

    pending = start_scores(shared.q, q_held, shared.k1, shared.full1, step & 1, opaque_zero, unused, HEAD_DIM)
    scores = finish_scores(pending, shared.mask1, shared.full1, step & 1)
    if LAST:
        arrive(Q_EMPTY, ALL)
    block_max = gl.max(scores, 1)
    score_max = gl.maximum(attention.score_max, block_max)
    wait(P0_FULL, PAIR)
    row_max0 = shared.row_max0.load(SCORE_ROWS)
    row_max1 = raise_row_max(row_max0, block_max, scale_log2)
    shared.row_max1.store(row_max1)
    arrive(ROW_MAX1_FULL, PAIR)
    alpha0 = gl.exp2((attention.row_max - row_max0) * scale_log2)
    alpha1 = gl.exp2((row_max0 - row_max1) * scale_log2)
    p = probabilities(scores, row_max1, scale_log2)
    p_rounded = p.to(k1_right.dtype)
    shared.p1.index(opaque_zero).store(p_rounded)
    if LAST:
        shared.row_sum1.store(attention.row_sum * alpha0 * alpha1 + gl.sum(p, 1))
    fence_async_shared()
    arrive(P1_FULL, PAIR)

    pending = warpgroup_mma(shared.p0.index(opaque_zero), k0_right, rescale(attention.out, alpha0), is_async=True)
    row_sum = attention.row_sum * alpha0 * alpha1 + gl.sum(p, 1)
    if LAST:
        row_sum += shared.row_sum0.load(SCORE_ROWS) * alpha1
        score_max = gl.maximum(score_max, shared.score_max0.load(SCORE_ROWS))
    out = warpgroup_mma_wait(0, deps=[pending])
    arrive(K0_RIGHT_EMPTY, PAIR)

    pending = warpgroup_mma(gl.convert_layout(p_rounded, P_OPERAND), k1_right, rescale(out, alpha1), is_async=True)
    out = warpgroup_mma_wait(0, deps=[pending])
    if not LAST:
        arrive(K1_RIGHT_EMPTY, PAIR)
    return Attention(out, row_max1, row_sum, score_max)


@gluon.jit
def consume_even(output, problem, shared, HEAD_DIM: gl.constexpr):
    arrive(K0_LEFT_EMPTY, PAIR)
    arrive(K1_LEFT_EMPTY, PAIR)
    arrive(Q_EMPTY, ALL)
    unused = gl.zeros([64, 64], gl.float32, SCORES)
    step = 0  # pairs so far, over all tiles: its parity is the phase of the K barriers
    q_phase = 0
    first = gl.program_id(0)
    pairs = pairs_of(problem.selected(first))

    mbarrier.wait(shared.q_full, q_phase)
    q_held = hold_queries(shared.q, 0, HEAD_DIM)
    pending = start_scores(shared.q, q_held, shared.k0, shared.full0, 0, 0, unused, HEAD_DIM)
    scores = finish_scores(pending, shared.mask0, shared.full0, 0)
    for tile in range(first, problem.tiles, gl.num_programs(0)):
        next_pairs = pairs_of(problem.selected(tile + gl.num_programs(0)))
        attention = empty_attention()
        for _ in range(opaque(pairs) - 1):
            attention = _attend_even(attention, scores, shared, step, output.scale_log2, False)
            step += 1
            pending = start_scores(shared.q, q_held, shared.k0, shared.full0, step & 1, step >> 30, unused, HEAD_DIM)
            scores = finish_scores(pending, shared.mask0, shared.full0, step & 1)

        arrive(Q_EMPTY, ALL)
        attention = _attend_even(attention, scores, shared, step, output.scale_log2, True)
        step += 1
        q_phase ^= 1
        start_out(output, attention, problem, tile, shared.k1.left.index(step >> 30), shared.k1_offsets.left, 0)
        # The next tile's first scores are under way while this one's output is copied. Block 1 is let go before they
        # wait for the rest of block 0, so that the two come from memory at the same time.
        mbarrier.wait(shared.q_full, q_phase)
        q_held = hold_queries(shared.q, step >> 30, HEAD_DIM)
        pending = start_left_scores(shared.q, shared.k0, shared.full0, step & 1, step >> 30, unused)
        tma.store_wait(0)
        arrive(K1_LEFT_EMPTY, PAIR)
        pending = add_right_scores(pending, shared.q, q_held, shared.k0, shared.full0, step & 1, step >> 30, HEAD_DIM)
        scores = finish_scores(pending, shared.mask0, shared.full0, step & 1)
        pairs = next_pairs


@gluon.jit
def consume_odd(output, problem, shared, HEAD_DIM: gl.constexpr):
    arrive(K0_RIGHT_EMPTY, PAIR)
    arrive(K1_RIGHT_EMPTY, PAIR)
    arrive(Q_EMPTY, ALL)
    unused = gl.zeros([64, 64], gl.float32, SCORES)
    step = 0
    q_phase = 0
    first = gl.program_id(0)
    pairs = pairs_of(problem.selected(first))
    for tile in range(first, problem.tiles, gl.num_programs(0)):
        next_pairs = pairs_of(problem.selected(tile + gl.num_programs(0)))
        mbarrier.wait(shared.q_full, q_phase)
        q_phase ^= 1
        q_held = hold_queries(shared.q, step >> 30, HEAD_DIM)
        attention = empty_attention()
        for _ in range(opaque(pairs) - 1):
            attention = _attend_odd(attention, q_held, shared, step, unused, output.scale_log2, HEAD_DIM, False)
            step += 1
        attention = _attend_odd(attention, q_held, shared, step, unused, output.scale_log2, HEAD_DIM, True)
        step += 1
        start_out(output, attention, problem, tile, shared.k1.right.index(step >> 30), shared.k1_offsets.right, 1)
        store_statistics(output, attention, problem, tile)
        tma.store_wait(0)
        arrive(K1_RIGHT_EMPTY, PAIR)
        pairs = next_pairs
