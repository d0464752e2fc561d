"""The two consumer warpgroups. Each owns a half of the output's columns, and the scores of one block of a pair.

A pair takes, on the tensor cores (0L: block 0's weights x the left half of its values):

    left consumer   | scores 0 |  0L  |  1L  | scores 0 of the next pair ...
    right consumer  |     scores 1     |  0R  |  1R  | scores 1 of the next pair ...

While one consumer computes weights, the other multiplies. Block 0's weights reach the right consumer, and block 1's
the left one, through shared memory, with the maximum that they are relative to. They are published before the
consumer's own multiplication by them, as a warp that issues a multiplication waits until the tensor cores take it.
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

from flashlatte.kernels.hopper.named_barriers import arrive, wait
from flashlatte.ops.sparse_prefill.hopper import barriers
from flashlatte.ops.sparse_prefill.hopper.epilogue import start_out, store_statistics
from flashlatte.ops.sparse_prefill.hopper.softmax import (
    SCORE_LAYOUT,
    SCORE_ROW,
    WEIGHT_LAYOUT,
    Attention,
    add_right_scores,
    empty_attention,
    finish_scores,
    hold_queries,
    raised,
    rescale,
    start_left_scores,
    start_scores,
    weights_of,
)
from flashlatte.ops.sparse_prefill.hopper.state import kept, pairs_of


@gluon.jit
def _attend_left(attention, scores, shared, step, scale_log2, LAST: gl.constexpr):
    """A pair, from block 0's scores. After the last pair of a tile block 1's left half is not let go: out needs it."""
    opaque_zero = step >> 30
    k0_left = shared.k0.left.index(opaque_zero)
    k1_left = shared.k1.left.index(opaque_zero)

    block_max = gl.max(scores, 1)
    row_max = gl.maximum(attention.row_max, block_max)
    reference0 = raised(attention.reference, block_max, scale_log2)
    weights = weights_of(scores, reference0, scale_log2)
    narrow = weights.to(k0_left.dtype)
    decay = gl.exp2((attention.reference - reference0) * scale_log2)
    shared.reference0.store(reference0)
    shared.weights0.index(opaque_zero).store(narrow)
    if LAST:
        shared.sum0.store(attention.row_sum * decay + gl.sum(weights, 1))
        shared.max0.store(row_max)
    fence_async_shared()
    arrive(barriers.WEIGHTS0_READY, barriers.PAIR)

    pending = warpgroup_mma(
        gl.convert_layout(narrow, WEIGHT_LAYOUT), k0_left, rescale(attention.out, decay), is_async=True
    )
    row_sum = attention.row_sum * decay + gl.sum(weights, 1)
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
    if not LAST:
        arrive(barriers.LEFT1_FREE, barriers.PAIR)
    return Attention(out, reference1, row_sum, row_max)


@gluon.jit
def _attend_right(attention, q_held, shared, step, unused, scale_log2, HEAD_DIM: gl.constexpr, LAST: gl.constexpr):
    """A pair, with block 1's scores. After the last pair of a tile block 1's right half is not let go."""
    opaque_zero = step >> 30
    k0_right = shared.k0.right.index(opaque_zero)
    k1_right = shared.k1.right.index(opaque_zero)

    pending = start_scores(shared.q, q_held, shared.k1, shared.ready1, step & 1, opaque_zero, unused, HEAD_DIM)
    scores = finish_scores(pending, shared.mask1, shared.ready1, step & 1)
    if LAST:
        arrive(barriers.Q_FREE, barriers.ALL)
    block_max = gl.max(scores, 1)
    row_max = gl.maximum(attention.row_max, block_max)
    wait(barriers.WEIGHTS0_READY, barriers.PAIR)
    reference0 = shared.reference0.load(SCORE_ROW)
    reference1 = raised(reference0, block_max, scale_log2)
    shared.reference1.store(reference1)
    arrive(barriers.REFERENCE1_READY, barriers.PAIR)
    decay0 = gl.exp2((attention.reference - reference0) * scale_log2)
    decay1 = gl.exp2((reference0 - reference1) * scale_log2)
    weights = weights_of(scores, reference1, scale_log2)
    narrow = weights.to(k1_right.dtype)
    shared.weights1.index(opaque_zero).store(narrow)
    if LAST:
        shared.sum1.store(attention.row_sum * decay0 * decay1 + gl.sum(weights, 1))
    fence_async_shared()
    arrive(barriers.WEIGHTS1_READY, barriers.PAIR)

    pending = warpgroup_mma(shared.weights0.index(opaque_zero), k0_right, rescale(attention.out, decay0), is_async=True)
    row_sum = attention.row_sum * decay0 * decay1 + gl.sum(weights, 1)
    if LAST:
        row_sum += shared.sum0.load(SCORE_ROW) * decay1
        row_max = gl.maximum(row_max, shared.max0.load(SCORE_ROW))
    out = warpgroup_mma_wait(0, deps=[pending])
    arrive(barriers.RIGHT0_FREE, barriers.PAIR)

    pending = warpgroup_mma(gl.convert_layout(narrow, WEIGHT_LAYOUT), k1_right, rescale(out, decay1), is_async=True)
    out = warpgroup_mma_wait(0, deps=[pending])
    if not LAST:
        arrive(barriers.RIGHT1_FREE, barriers.PAIR)
    return Attention(out, reference1, row_sum, row_max)


@gluon.jit
def consume_left(output, problem, shared, HEAD_DIM: gl.constexpr):
    arrive(barriers.LEFT0_FREE, barriers.PAIR)
    arrive(barriers.LEFT1_FREE, barriers.PAIR)
    arrive(barriers.Q_FREE, barriers.ALL)
    unused = gl.zeros([64, 64], gl.float32, SCORE_LAYOUT)
    step = 0  # pairs so far, over all tiles: its parity is the phase of the K barriers
    q_phase = 0
    first = gl.program_id(0)
    pairs = pairs_of(problem.selected(first))

    mbarrier.wait(shared.q_ready, q_phase)
    q_held = hold_queries(shared.q, 0, HEAD_DIM)
    pending = start_scores(shared.q, q_held, shared.k0, shared.ready0, 0, 0, unused, HEAD_DIM)
    scores = finish_scores(pending, shared.mask0, shared.ready0, 0)
    for tile in range(first, problem.tiles, gl.num_programs(0)):
        next_pairs = pairs_of(problem.selected(tile + gl.num_programs(0)))
        attention = empty_attention()
        for _ in range(kept(pairs) - 1):
            attention = _attend_left(attention, scores, shared, step, output.scale_log2, False)
            step += 1
            pending = start_scores(shared.q, q_held, shared.k0, shared.ready0, step & 1, step >> 30, unused, HEAD_DIM)
            scores = finish_scores(pending, shared.mask0, shared.ready0, step & 1)

        arrive(barriers.Q_FREE, barriers.ALL)
        attention = _attend_left(attention, scores, shared, step, output.scale_log2, True)
        step += 1
        q_phase ^= 1
        start_out(output, attention, problem, tile, shared.k1.left.index(step >> 30), shared.k1_offsets.left, 0)
        # The next tile's first scores are under way while this one's output is copied. Block 1 is let go before they
        # wait for the rest of block 0, so that the two come from memory at the same time.
        mbarrier.wait(shared.q_ready, q_phase)
        q_held = hold_queries(shared.q, step >> 30, HEAD_DIM)
        pending = start_left_scores(shared.q, shared.k0, shared.ready0, step & 1, step >> 30, unused)
        tma.store_wait(0)
        arrive(barriers.LEFT1_FREE, barriers.PAIR)
        pending = add_right_scores(pending, shared.q, q_held, shared.k0, shared.ready0, step & 1, step >> 30, HEAD_DIM)
        scores = finish_scores(pending, shared.mask0, shared.ready0, step & 1)
        pairs = next_pairs


@gluon.jit
def consume_right(output, problem, shared, HEAD_DIM: gl.constexpr):
    arrive(barriers.RIGHT0_FREE, barriers.PAIR)
    arrive(barriers.RIGHT1_FREE, barriers.PAIR)
    arrive(barriers.Q_FREE, barriers.ALL)
    unused = gl.zeros([64, 64], gl.float32, SCORE_LAYOUT)
    step = 0
    q_phase = 0
    first = gl.program_id(0)
    pairs = pairs_of(problem.selected(first))
    for tile in range(first, problem.tiles, gl.num_programs(0)):
        next_pairs = pairs_of(problem.selected(tile + gl.num_programs(0)))
        mbarrier.wait(shared.q_ready, q_phase)
        q_phase ^= 1
        q_held = hold_queries(shared.q, step >> 30, HEAD_DIM)
        attention = empty_attention()
        for _ in range(kept(pairs) - 1):
            attention = _attend_right(attention, q_held, shared, step, unused, output.scale_log2, HEAD_DIM, False)
            step += 1
        attention = _attend_right(attention, q_held, shared, step, unused, output.scale_log2, HEAD_DIM, True)
        step += 1
        start_out(output, attention, problem, tile, shared.k1.right.index(step >> 30), shared.k1_offsets.right, 1)
        store_statistics(output, attention, problem, tile)
        tma.store_wait(0)
        arrive(barriers.RIGHT1_FREE, barriers.PAIR)
        pairs = next_pairs
