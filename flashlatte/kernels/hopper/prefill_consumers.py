"""The consumers of prefill kernels: four warps each, with 64 query rows each and the same blocks of keys and values.

``shared`` has the rings k and v (tuples of one or two tiles of columns), their full barriers, the two consumers, and
with pages ``absent``, a word per stage of K that marks absent ones.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import barriers, output_tiles
from flashlatte.kernels.hopper.output_tiles import accumulator
from flashlatte.kernels.hopper.ptx.registers import mask_eights, materialize, opaque, round_here
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
    read_scalar,
    signal_empty,
    stage_of,
    wait_k,
    wait_v,
)


@gluon.jit
def _start_scores(consumer, shared, step, unused):
    """Start q · k of the block of a step, which has arrived. ``unused`` [64, keys]: registers that the scores may
    reuse."""
    # Opaque to the compiler, which would otherwise hoist the matrix descriptors of all chunks out of the loop and spill
    # them.
    zero = step >> 30
    scores = unused
    CHUNKS: gl.constexpr = consumer.q[0].shape[0]
    for chunk in gl.static_range(CHUNKS):
        q = consumer.q[0].index(chunk + zero)
        k = shared.k[0].index(stage_of(step) * CHUNKS + chunk)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=chunk > 0, is_async=True)
    if len(shared.k) == 2:
        k = shared.k[1].index(stage_of(step))
        scores = warpgroup_mma(consumer.q[1].index(zero), k.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _read_absent(shared, step, CONFIG: gl.constexpr):
    """One bit per 8 keys of the block of a step, set if their page is not in the cache; 0 without pages."""
    if CONFIG.has_pages:
        return read_scalar(shared.absent, stage_of(step))
    else:
        return 0


@gluon.jit
def _mask(scores, mask, first_key, absent, CONFIG: gl.constexpr):
    """Scores [64, keys] of the block at ``first_key``, with -inf for masked and absent keys."""
    scores = apply_mask(scores, mask, first_key, CONFIG.pack)
    return _mask_absent(scores, absent) if CONFIG.has_pages else scores


@gluon.jit
def _mask_absent(scores, absent):
    if absent != 0:
        scores = mask_eights(scores, gl.full(scores.shape, 0, gl.int32, scores.type.layout) + absent)
    return scores


@gluon.jit
def _operand(p, DTYPE: gl.constexpr):
    """P as an operand, rounded here and not later, because the next scores reuse its registers."""
    return gl.convert_layout(round_here(p, DTYPE), gl.DotOperandLayout(0, p.type.layout, 2))


@gluon.jit
def consume(
    args,
    FIRST_ROW: gl.constexpr,
    CONFIG: gl.constexpr,
    read_work_tile: gl.constexpr,
    zero_values: gl.constexpr,
    store: gl.constexpr,
):
    """The consumer of a tile's rows from FIRST_ROW (0 or 64) on.

    Args:
        CONFIG: has ``keys``, the keys of a block; ``pack``, the query heads of a tile, whose rows have the same
            position; ``has_pages``, whether keys are in pages, which may be absent.
        read_work_tile: reads the work tile from shared memory.
        zero_values: (shared, step, work_tile, first_key, IS_LAST), zeroes the values of a block that are visible to
            none of the tile's queries. They may be NaN, and 0 · NaN is NaN. IS_LAST: the block is the tile's last one,
            which comes first.
        store: the epilogue, as ``epilogue.store`` of an operation.
    """
    shared = args.shared
    IS_FIRST: gl.constexpr = FIRST_ROW == 0
    consumer = shared.first if IS_FIRST else shared.second
    OWN_PINGPONG: gl.constexpr = PINGPONG_FIRST if IS_FIRST else PINGPONG_SECOND
    OTHER_PINGPONG: gl.constexpr = PINGPONG_SECOND if IS_FIRST else PINGPONG_FIRST
    Q_EMPTY: gl.constexpr = Q_EMPTY_FIRST if IS_FIRST else Q_EMPTY_SECOND
    KEYS: gl.constexpr = CONFIG.keys
    DTYPE: gl.constexpr = shared.v[0].dtype
    SCORE_PRODUCTS: gl.constexpr = consumer.q[0].shape[0] + len(shared.k) - 1
    scale_log2 = args.scale_log2
    if not IS_FIRST:
        barriers.arrive(PINGPONG_FIRST, barriers.PAIR_THREADS)
    signal_empty(Q_EMPTY)
    step = 0
    tiles_taken = 0
    mbarrier.wait(consumer.full.index(0), 0)
    wait_k(shared, step)
    scores = gl.zeros([ROWS, KEYS], gl.float32, accumulator(KEYS))
    scores = _start_scores(consumer, shared, step, scores)
    absent = _read_absent(shared, step, CONFIG)
    scores = warpgroup_mma_wait(0, deps=[scores])
    barriers.arrive_at(K_EMPTY, BOTH_CONSUMER_THREADS)
    blocks = read_scalar(consumer.work_tile, 0)
    while blocks > 0:
        work_tile = read_work_tile(consumer.work_tile)
        mask = make_mask(work_tile, args.window, FIRST_ROW, CONFIG.pack)
        first_key = work_tile.last * KEYS
        scores = _mask(scores, mask, first_key, absent, CONFIG)
        p, state, alpha = attend(empty_state(accumulator(KEYS)), scores, scale_log2)
        output = output_tiles.zeros(shared.v, KEYS)
        wait_v(shared, step)
        zero_values(shared, step, work_tile, first_key, True)

        if blocks == 1:
            barriers.arrive(Q_EMPTY, ONE_CONSUMER_THREADS)
        for block in range(1, opaque(blocks)):
            first_key -= KEYS
            operand = _operand(p, DTYPE)
            wait_k(shared, step + 1)
            barriers.wait(OWN_PINGPONG, barriers.PAIR_THREADS)
            scores = _start_scores(consumer, shared, step + 1, p)
            output = output_tiles.start(shared.v, step, operand, output, KEYS)
            barriers.arrive(OTHER_PINGPONG, barriers.PAIR_THREADS)
            absent = _read_absent(shared, step + 1, CONFIG)
            scores = warpgroup_mma_wait(len(output), deps=[scores])
            barriers.arrive_at(K_EMPTY + stage_of(step + 1), BOTH_CONSUMER_THREADS)
            if block == blocks - 1:
                barriers.arrive(Q_EMPTY, ONE_CONSUMER_THREADS)
            scores = _mask(scores, mask, first_key, absent, CONFIG)
            p, state, alpha = attend(state, scores, scale_log2)
            p = materialize(p)
            wait_v(shared, step + 1)
            output, p = output_tiles.wait_with(output, p)
            barriers.arrive_at(V_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS)
            zero_values(shared, step + 1, work_tile, first_key, False)
            output = output_tiles.rescale(output, alpha)
            step += 1

        tiles_taken += 1
        operand = _operand(p, DTYPE)
        barriers.wait(OWN_PINGPONG, barriers.PAIR_THREADS)
        output = output_tiles.start(shared.v, step, operand, output, KEYS)
        # The next tile's first scores overlap with the store of this tile's output.
        mbarrier.wait(consumer.full.index(0), tiles_taken & 1)
        wait_k(shared, step + 1)
        scores = _start_scores(consumer, shared, step + 1, p)
        barriers.arrive(OTHER_PINGPONG, barriers.PAIR_THREADS)
        absent = _read_absent(shared, step + 1, CONFIG)
        output = output_tiles.wait(SCORE_PRODUCTS, output)
        barriers.arrive_at(V_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS)
        step += 1
        store(output, state, work_tile, args.results, scale_log2, FIRST_ROW, CONFIG)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barriers.arrive_at(K_EMPTY + stage_of(step), BOTH_CONSUMER_THREADS)
        blocks = read_scalar(consumer.work_tile, 0)
    if IS_FIRST:
        # Consume the second consumer's last arrival, which no other wait matches.
        barriers.wait(PINGPONG_FIRST, barriers.PAIR_THREADS)
