"""The two consumers: four warps each, with 64 query rows each and the same blocks of keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.ptx.registers import materialize, opaque, round_here
from flashlatte.kernels.hopper.softmax import rescale
from flashlatte.kernels.hopper.two_consumers import (
    BOTH_CONSUMER_THREADS,
    CHUNK,
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
    read_scalar,
    signal_empty,
    stage_of,
    wait_k,
    wait_v,
)
from flashlatte.ops.paged_attention.hopper import epilogue, out_of_range_keys
from flashlatte.ops.paged_attention.hopper.tiles import (
    KEYS,
    SCORES,
    output_layout,
    read_work_tile,
    values_of,
)


@gluon.jit
def _start_scores(consumer, shared, step, unused, CHUNKS: gl.constexpr):
    """Start q · k of the block of a step, which has arrived. ``unused`` [64, 128]: registers that the scores may
    reuse."""
    # Opaque to the compiler, which would otherwise hoist the matrix descriptors of all chunks out of the loop and spill
    # them.
    zero = step >> 30
    scores = unused
    for chunk in gl.static_range(CHUNKS):
        q = consumer.q.index(chunk + zero)
        k = shared.k.index(stage_of(step) * CHUNKS + chunk)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=chunk > 0, is_async=True)
    return scores


@gluon.jit
def _start_output(shared, step, p, output):
    """Start P · v of the block of a step, which has arrived."""
    return warpgroup_mma(p, values_of(shared, step), output, is_async=True)


@gluon.jit
def _operand(p, DTYPE: gl.constexpr, OUTPUT: gl.constexpr):
    """P as an operand, rounded here and not later, because the next scores reuse its registers."""
    return gl.convert_layout(round_here(p, DTYPE), gl.DotOperandLayout(0, OUTPUT, 2), assert_trivial=True)


@gluon.jit
def _zero_out_of_range_values(shared, step, work_tile, first_key):
    """Zero the values of a block outside of the visible keys of the tile."""
    if (first_key < work_tile.first_key) | (first_key + KEYS > work_tile.keys):
        tile = shared.v.index(stage_of(step))
        out_of_range_keys.zero_values(tile, work_tile.first_key - first_key, work_tile.keys - first_key)


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
    DTYPE: gl.constexpr = shared.v.dtype
    CHUNKS: gl.constexpr = CONFIG.chunks
    OUTPUT: gl.constexpr = output_layout(CONFIG.v_chunks)
    scale_log2 = args.scale_log2
    signal_empty(Q_EMPTY)
    step = 0
    tiles_taken = 0
    mbarrier.wait(consumer.full.index(0), 0)
    wait_k(shared, step)
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _start_scores(consumer, shared, step, scores, CHUNKS)
    absent = read_scalar(shared.absent, stage_of(step))
    scores = warpgroup_mma_wait(0, deps=[scores])
    barriers.arrive_at(K_EMPTY, BOTH_CONSUMER_THREADS)
    blocks = read_scalar(consumer.work_tile, 0)
    while blocks > 0:
        work_tile = read_work_tile(consumer.work_tile)
        mask = make_mask(work_tile, args.window, FIRST_ROW, CONFIG.pack)
        first_key = work_tile.last * KEYS
        scores = out_of_range_keys.mask_absent_pages(apply_mask(scores, mask, first_key, CONFIG.pack), absent)
        p, state, alpha = attend(empty_state(SCORES), scores, scale_log2)
        output = gl.zeros([ROWS, CONFIG.v_chunks * CHUNK], gl.float32, OUTPUT)
        wait_v(shared, step)
        _zero_out_of_range_values(shared, step, work_tile, first_key)

        if blocks == 1:
            barriers.arrive(Q_EMPTY, ONE_CONSUMER_THREADS)
        for block in range(1, opaque(blocks)):
            first_key -= KEYS
            operand = _operand(p, DTYPE, OUTPUT)
            wait_k(shared, step + 1)
            barriers.wait(OWN_PINGPONG, barriers.PAIR_THREADS)
            scores = _start_scores(consumer, shared, step + 1, p, CHUNKS)
            output = _start_output(shared, step, operand, output)
            barriers.arrive(OTHER_PINGPONG, barriers.PAIR_THREADS)
            absent = read_scalar(shared.absent, stage_of(step + 1))
            scores = warpgroup_mma_wait(1, deps=[scores])
            barriers.arrive_at(K_EMPTY + stage_of(step + 1), BOTH_CONSUMER_THREADS)
            if block == blocks - 1:
                barriers.arrive(Q_EMPTY, ONE_CONSUMER_THREADS)
            scores = out_of_range_keys.mask_absent_pages(apply_mask(scores, mask, first_key, CONFIG.pack), absent)
            p, state, alpha = attend(state, scores, scale_log2)
            p = materialize(p)
            wait_v(shared, step + 1)
            # P passes through the wait so that it is not rounded earlier, which would keep another operand in
            # registers.
            output, p = warpgroup_mma_wait(0, deps=[output, p])
            barriers.arrive_at(V_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS)
            _zero_out_of_range_values(shared, step + 1, work_tile, first_key)
            output = rescale(output, alpha)
            step += 1

        tiles_taken += 1
        operand = _operand(p, DTYPE, OUTPUT)
        barriers.wait(OWN_PINGPONG, barriers.PAIR_THREADS)
        output = _start_output(shared, step, operand, output)
        # The next tile's first scores overlap with the store of this tile's output.
        mbarrier.wait(consumer.full.index(0), tiles_taken & 1)
        wait_k(shared, step + 1)
        scores = _start_scores(consumer, shared, step + 1, p, CHUNKS)
        barriers.arrive(OTHER_PINGPONG, barriers.PAIR_THREADS)
        absent = read_scalar(shared.absent, stage_of(step + 1))
        output = warpgroup_mma_wait(CHUNKS, deps=[output])
        barriers.arrive_at(V_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS)
        step += 1
        epilogue.store(output, state, work_tile, args.results, scale_log2, FIRST_ROW, CONFIG)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barriers.arrive_at(K_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS)
        blocks = read_scalar(consumer.work_tile, 0)


@gluon.jit
def consume_first(args, CONFIG: gl.constexpr):
    _consume(args, args.shared.first, PINGPONG_FIRST, PINGPONG_SECOND, Q_EMPTY_FIRST, 0, CONFIG)
    # Consume the second consumer's last arrival.
    barriers.wait(PINGPONG_FIRST, barriers.PAIR_THREADS)


@gluon.jit
def consume_second(args, CONFIG: gl.constexpr):
    barriers.arrive(PINGPONG_FIRST, barriers.PAIR_THREADS)
    _consume(args, args.shared.second, PINGPONG_SECOND, PINGPONG_FIRST, Q_EMPTY_SECOND, ROWS, CONFIG)
