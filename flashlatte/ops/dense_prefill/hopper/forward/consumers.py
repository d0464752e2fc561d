"""The two consumers: four warps each, with 64 query rows each and the same blocks of keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.ptx.registers import materialize, opaque, round_here
from flashlatte.kernels.hopper.two_consumers import (
    BOTH_CONSUMER_THREADS,
    K_EMPTY,
    ONE_CONSUMER_THREADS,
    PINGPONG_FIRST,
    PINGPONG_SECOND,
    Q_EMPTY_FIRST,
    Q_EMPTY_SECOND,
    ROWS,
    V_EMPTY,
    apply_mask,
    attend,
    empty_state,
    make_mask,
    signal_empty,
    stage_of,
    wait_k,
    wait_v,
)
from flashlatte.ops.dense_prefill.hopper.forward import epilogue, out_of_range_keys, out_tiles
from flashlatte.ops.dense_prefill.hopper.forward.tiles import accumulator, num_chunks, read_work_tile


@gluon.jit
def _start_scores(consumer, shared, step, unused, D_QK: gl.constexpr):
    """Start q · k of the block of a step, which has arrived. ``unused`` [64, keys]: registers that the scores may
    reuse."""
    # Opaque to the compiler, which would otherwise hoist the matrix descriptors of all chunks out of the loop and spill
    # them.
    zero = step >> 30
    scores = unused
    CHUNKS: gl.constexpr = num_chunks(D_QK)
    for chunk in gl.static_range(CHUNKS):
        q = consumer.q[0].index(chunk + zero)
        k = shared.k[0].index(stage_of(step) * CHUNKS + chunk)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=chunk > 0, is_async=True)
    if len(shared.k) == 2:
        k = shared.k[1].index(stage_of(step))
        scores = warpgroup_mma(consumer.q[1].index(zero), k.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _operand(p, DTYPE: gl.constexpr):
    """P as an operand, rounded here and not later, because the next scores reuse its registers."""
    return gl.convert_layout(round_here(p, DTYPE), gl.DotOperandLayout(0, p.type.layout, 2))


@gluon.jit
def _consume(
    args,
    consumer,
    OWN_PINGPONG: gl.constexpr,
    OTHER_PINGPONG: gl.constexpr,
    Q_EMPTY: gl.constexpr,
    FIRST_ROW: gl.constexpr,
    CONFIG: gl.constexpr,
):
    shared = args.shared
    D_QK: gl.constexpr = CONFIG.d_qk
    KEYS: gl.constexpr = shared.v[0].shape[1]
    DTYPE: gl.constexpr = shared.v[0].dtype
    scale_log2 = args.scale_log2
    signal_empty(Q_EMPTY)
    step = 0
    tiles_taken = 0
    mbarrier.wait(consumer.full.index(0), 0)
    wait_k(shared, step)
    scores = gl.zeros([ROWS, KEYS], gl.float32, accumulator(KEYS))
    scores = _start_scores(consumer, shared, step, scores, D_QK)
    scores = warpgroup_mma_wait(0, deps=[scores])
    barriers.arrive_at(K_EMPTY, BOTH_CONSUMER_THREADS)
    work_tile = read_work_tile(consumer.work_tile)
    blocks = work_tile.blocks
    while blocks > 0:
        work_tile = read_work_tile(consumer.work_tile)
        mask = make_mask(work_tile, args.window, FIRST_ROW, 1)
        first_key = work_tile.last * KEYS
        scores = apply_mask(scores, mask, first_key, 1)
        p, state, alpha = attend(empty_state(accumulator(KEYS)), scores, scale_log2)
        output = out_tiles.zeros(CONFIG.d_v)
        wait_v(shared, step)
        if first_key + KEYS > work_tile.keys:
            out_of_range_keys.zero_values(shared.v, stage_of(step), work_tile.keys - first_key)

        if blocks == 1:
            barriers.arrive(Q_EMPTY, ONE_CONSUMER_THREADS)
        for block in range(1, opaque(blocks)):
            first_key -= KEYS
            operand = _operand(p, DTYPE)
            wait_k(shared, step + 1)
            barriers.wait(OWN_PINGPONG, barriers.PAIR_THREADS)
            scores = _start_scores(consumer, shared, step + 1, p, D_QK)
            output = out_tiles.start(shared, step, operand, output)
            barriers.arrive(OTHER_PINGPONG, barriers.PAIR_THREADS)
            scores = warpgroup_mma_wait(len(output), deps=[scores])
            barriers.arrive_at(K_EMPTY + stage_of(step + 1), BOTH_CONSUMER_THREADS)
            if block == blocks - 1:
                barriers.arrive(Q_EMPTY, ONE_CONSUMER_THREADS)
            scores = apply_mask(scores, mask, first_key, 1)
            p, state, alpha = attend(state, scores, scale_log2)
            p = materialize(p)
            wait_v(shared, step + 1)
            output, p = out_tiles.wait_with(output, p)
            barriers.arrive_at(V_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS)
            output = out_tiles.rescale(output, alpha)
            step += 1

        tiles_taken += 1
        operand = _operand(p, DTYPE)
        barriers.wait(OWN_PINGPONG, barriers.PAIR_THREADS)
        output = out_tiles.start(shared, step, operand, output)
        # The next tile's first scores overlap with the store of this tile's output.
        mbarrier.wait(consumer.full.index(0), tiles_taken & 1)
        wait_k(shared, step + 1)
        scores = _start_scores(consumer, shared, step + 1, p, D_QK)
        barriers.arrive(OTHER_PINGPONG, barriers.PAIR_THREADS)
        output = out_tiles.wait(num_chunks(D_QK) + len(shared.k) - 1, output)
        barriers.arrive_at(V_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS)
        step += 1
        epilogue.store(output, state, work_tile, args.results, scale_log2, FIRST_ROW, CONFIG)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barriers.arrive_at(K_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS)
        blocks = opaque(read_work_tile(consumer.work_tile).blocks)


@gluon.jit
def consume_first(args, CONFIG: gl.constexpr):
    _consume(args, args.shared.first, PINGPONG_FIRST, PINGPONG_SECOND, Q_EMPTY_FIRST, 0, CONFIG)
    # Consume the second consumer's last arrival, which no other wait matches.
    barriers.wait(PINGPONG_FIRST, barriers.PAIR_THREADS)


@gluon.jit
def consume_second(args, CONFIG: gl.constexpr):
    barriers.arrive(PINGPONG_FIRST, barriers.PAIR_THREADS)
    _consume(args, args.shared.second, PINGPONG_SECOND, PINGPONG_FIRST, Q_EMPTY_SECOND, ROWS, CONFIG)
