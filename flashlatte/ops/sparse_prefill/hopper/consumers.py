"""The two consumer warpgroups. Each owns a half of the output's columns, and the scores of one block of a pair.

A pair takes, on the tensor cores (0L: block 0's weights x the left half of its values):

    left consumer   | scores 0 |  0L  |  1L  | scores 0 of the next pair ...
    right consumer  |     scores 1     |  0R  |  1R  | scores 1 of the next pair ...

While one consumer computes weights, the other multiplies. Block 0's weights reach the right consumer, and block 1's
the left one, through shared memory, with the maximum that they are relative to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.named_barriers import arrive, wait
from flashlatte.ops.sparse_prefill.hopper import barriers
from flashlatte.ops.sparse_prefill.hopper.epilogue import store_out, store_statistics
from flashlatte.ops.sparse_prefill.hopper.softmax import (
    SCORE_LAYOUT,
    SCORE_ROW,
    WEIGHT_LAYOUT,
    Attention,
    empty_attention,
    finish_scores,
    raised,
    rescale,
    start_scores,
    weights_of,
)
from flashlatte.ops.sparse_prefill.hopper.state import kept, pairs_of


@gluon.jit
def _attend_left(attention, scores, shared, opaque_zero, scale_log2, LAST: gl.constexpr):
    k0_left = shared.k0.left.index(opaque_zero)
    k1_left = shared.k1.left.index(opaque_zero)

    block_max = gl.max(scores, 1)
    row_max = gl.maximum(attention.row_max, block_max)
    reference0 = raised(attention.reference, block_max, scale_log2)
    weights = weights_of(scores, reference0, scale_log2)
    narrow = weights.to(k0_left.dtype)
    decay = gl.exp2((attention.reference - reference0) * scale_log2)
    pending = warpgroup_mma(
        gl.convert_layout(narrow, WEIGHT_LAYOUT), k0_left, rescale(attention.out, decay), is_async=True
    )
    shared.reference0.store(reference0)
    shared.weights0.index(opaque_zero).store(narrow)
    row_sum = attention.row_sum * decay + gl.sum(weights, 1)
    if LAST:
        shared.sum0.store(row_sum)
        shared.max0.store(row_max)
    fence_async_shared()
    arrive(barriers.WEIGHTS0_READY, barriers.PAIR)
    out = warpgroup_mma_wait(0, deps=[pending])
    arrive(barriers.LEFT0_FREE, barriers.PAIR)

    wait(barriers.REFERENCE1_READY, barriers.PAIR)
    reference1 = shared.reference1.load(SCORE_ROW)
    decay = gl.exp2((reference0 - reference1) * scale_log2)
    out = rescale(out, decay)
    row_sum = row_sum * decay
    wait(barriers.WEIGHTS1_READY, barriers.PAIR)
    pending = warpgroup_mma(shared.weights1.index(opaque_zero), k1_left, out, is_async=True)
    if LAST:
        row_sum += shared.sum1.load(SCORE_ROW)
    out = warpgroup_mma_wait(0, deps=[pending])
    arrive(barriers.LEFT1_FREE, barriers.PAIR)
    return Attention(out, reference1, row_sum, row_max)


@gluon.jit
def _attend_right(attention, scores, shared, opaque_zero, scale_log2, LAST: gl.constexpr):
    k0_right = shared.k0.right.index(opaque_zero)
    k1_right = shared.k1.right.index(opaque_zero)

    block_max = gl.max(scores, 1)
    row_max = gl.maximum(attention.row_max, block_max)
    wait(barriers.WEIGHTS0_READY, barriers.PAIR)
    reference0 = shared.reference0.load(SCORE_ROW)
    reference1 = raised(reference0, block_max, scale_log2)
    shared.reference1.store(reference1)
    arrive(barriers.REFERENCE1_READY, barriers.PAIR)
    decay0 = gl.exp2((attention.reference - reference0) * scale_log2)
    pending = warpgroup_mma(shared.weights0.index(opaque_zero), k0_right, rescale(attention.out, decay0), is_async=True)
    weights = weights_of(scores, reference1, scale_log2)
    narrow = weights.to(k1_right.dtype)
    shared.weights1.index(opaque_zero).store(narrow)
    decay1 = gl.exp2((reference0 - reference1) * scale_log2)
    row_sum = attention.row_sum * decay0 * decay1 + gl.sum(weights, 1)
    if LAST:
        shared.sum1.store(row_sum)
    fence_async_shared()
    arrive(barriers.WEIGHTS1_READY, barriers.PAIR)
    if LAST:
        row_sum += shared.sum0.load(SCORE_ROW) * decay1
        row_max = gl.maximum(row_max, shared.max0.load(SCORE_ROW))
    out = warpgroup_mma_wait(0, deps=[pending])
    arrive(barriers.RIGHT0_FREE, barriers.PAIR)

    pending = warpgroup_mma(gl.convert_layout(narrow, WEIGHT_LAYOUT), k1_right, rescale(out, decay1), is_async=True)
    out = warpgroup_mma_wait(0, deps=[pending])
    arrive(barriers.RIGHT1_FREE, barriers.PAIR)
    return Attention(out, reference1, row_sum, row_max)


@gluon.jit
def _attend(attention, scores, shared, opaque_zero, scale_log2, SIDE: gl.constexpr, LAST: gl.constexpr):
    if SIDE == 0:
        return _attend_left(attention, scores, shared, opaque_zero, scale_log2, LAST)
    else:
        return _attend_right(attention, scores, shared, opaque_zero, scale_log2, LAST)


@gluon.jit
def _consume(output, problem, shared, k, mask, ready, SIDE: gl.constexpr, HEAD_DIM: gl.constexpr):
    unused = gl.zeros([64, 64], gl.float32, SCORE_LAYOUT)
    step = 0  # pairs so far, over all tiles: its parity is the phase of the K barriers
    q_phase = 0
    first = gl.program_id(0)
    pairs = pairs_of(problem.selected(first))

    mbarrier.wait(shared.q_ready, q_phase)
    pending = start_scores(shared.q, k, ready, 0, 0, unused, HEAD_DIM)
    scores = finish_scores(pending, mask, ready, 0)
    for tile in range(first, problem.tiles, gl.num_programs(0)):
        next_pairs = pairs_of(problem.selected(tile + gl.num_programs(0)))
        attention = empty_attention()
        for _ in range(kept(pairs) - 1):
            opaque_zero = step >> 30
            attention = _attend(attention, scores, shared, opaque_zero, output.scale_log2, SIDE, False)
            step += 1
            pending = start_scores(shared.q, k, ready, step & 1, opaque_zero, unused, HEAD_DIM)
            scores = finish_scores(pending, mask, ready, step & 1)

        arrive(barriers.Q_FREE, barriers.ALL)
        opaque_zero = step >> 30
        attention = _attend(attention, scores, shared, opaque_zero, output.scale_log2, SIDE, True)
        step += 1
        q_phase ^= 1
        # The next tile's first scores are under way while this one's output is stored.
        mbarrier.wait(shared.q_ready, q_phase)
        pending = start_scores(shared.q, k, ready, step & 1, opaque_zero, unused, HEAD_DIM)
        store_out(output, attention, problem, tile, SIDE)
        if SIDE == 1:
            store_statistics(output, attention, problem, tile)
        scores = finish_scores(pending, mask, ready, step & 1)
        pairs = next_pairs


@gluon.jit
def consume_left(output, problem, shared, HEAD_DIM: gl.constexpr):
    arrive(barriers.LEFT0_FREE, barriers.PAIR)
    arrive(barriers.LEFT1_FREE, barriers.PAIR)
    arrive(barriers.Q_FREE, barriers.ALL)
    _consume(output, problem, shared, shared.k0, shared.mask0, shared.ready0, 0, HEAD_DIM)


@gluon.jit
def consume_right(output, problem, shared, HEAD_DIM: gl.constexpr):
    arrive(barriers.RIGHT0_FREE, barriers.PAIR)
    arrive(barriers.RIGHT1_FREE, barriers.PAIR)
    arrive(barriers.Q_FREE, barriers.ALL)
    _consume(output, problem, shared, shared.k1, shared.mask1, shared.ready1, 1, HEAD_DIM)
