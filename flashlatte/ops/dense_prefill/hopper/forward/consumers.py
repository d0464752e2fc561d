"""The two consumers: four warps each, with 64 query rows each and the same blocks of keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.ptx.registers import computed_here, opaque, round_here
from flashlatte.kernels.hopper.two_consumers import (
    K_EMPTY,
    Q_EMPTY_FIRST,
    Q_EMPTY_SECOND,
    ROWS,
    STAGES,
    TURN_FIRST,
    TURN_SECOND,
    V_EMPTY,
    WITH_BOTH,
    WITH_ONE,
    apply_mask,
    attend,
    empty_state,
    mask_of,
    stage_of,
    wait_k,
    wait_v,
)
from flashlatte.ops.dense_prefill.hopper.forward import epilogue, foreign_keys, out_tiles
from flashlatte.ops.dense_prefill.hopper.forward.tiles import accumulator, chunks_of, read_ticket


@gluon.jit
def _start_scores(mine, shared, step, unused, D_QK: gl.constexpr):
    """Start q · k of the block of a step, which has come. ``unused`` [64, keys] lends its registers."""
    # Not a constant to the compiler, which would hoist the descriptors of all chunks out of the loop, and spill them.
    zero = step >> 30
    scores = unused
    CHUNKS: gl.constexpr = chunks_of(D_QK)
    for chunk in gl.static_range(CHUNKS):
        q = mine.q[0].index(chunk + zero)
        k = shared.k[0].index(stage_of(step) * CHUNKS + chunk)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=chunk > 0, is_async=True)
    if len(shared.k) == 2:
        k = shared.k[1].index(stage_of(step))
        scores = warpgroup_mma(mine.q[1].index(zero), k.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _operand(p, DTYPE: gl.constexpr):
    """P as an operand. Rounded here and not later, as scores take its registers next."""
    return gl.convert_layout(round_here(p, DTYPE), gl.DotOperandLayout(0, p.type.layout, 2))


@gluon.jit
def _consume(
    call,
    mine,
    MY_TURN: gl.constexpr,
    OTHER_TURN: gl.constexpr,
    Q_EMPTY: gl.constexpr,
    FIRST_ROW: gl.constexpr,
    D_QK: gl.constexpr,
    D_V: gl.constexpr,
    OUT_ALIGN: gl.constexpr,
):
    shared = call.shared
    KEYS: gl.constexpr = shared.v[0].shape[1]
    DTYPE: gl.constexpr = shared.v[0].dtype
    scale_log2 = call.scale_log2
    barriers.arrive(Q_EMPTY, WITH_ONE)
    for stage in gl.static_range(STAGES):
        barriers.arrive_at(K_EMPTY + stage, WITH_BOTH)
        barriers.arrive_at(V_EMPTY + stage, WITH_BOTH)

    step = 0
    tiles_taken = 0
    mbarrier.wait(mine.full.index(0), 0)
    wait_k(shared, step)
    scores = gl.zeros([ROWS, KEYS], gl.float32, accumulator(KEYS))
    scores = _start_scores(mine, shared, step, scores, D_QK)
    scores = warpgroup_mma_wait(0, deps=[scores])
    barriers.arrive_at(K_EMPTY, WITH_BOTH)
    ticket = read_ticket(mine.ticket)
    blocks = ticket.blocks
    while blocks > 0:
        ticket = read_ticket(mine.ticket)
        mask = mask_of(ticket, call.window, FIRST_ROW, 1)
        first_key = ticket.last * KEYS
        scores = apply_mask(scores, mask, first_key, 1)
        p, state, alpha = attend(empty_state(accumulator(KEYS)), scores, scale_log2)
        output = out_tiles.zeros(D_V)
        wait_v(shared, step)
        if first_key + KEYS > ticket.keys:
            foreign_keys.zero_values(shared.v, stage_of(step), ticket.keys - first_key)

        if blocks == 1:
            barriers.arrive(Q_EMPTY, WITH_ONE)
        for block in range(1, opaque(blocks)):
            first_key -= KEYS
            operand = _operand(p, DTYPE)
            wait_k(shared, step + 1)
            barriers.wait(MY_TURN, barriers.PAIR)
            scores = _start_scores(mine, shared, step + 1, p, D_QK)
            output = out_tiles.start(shared, step, operand, output)
            barriers.arrive(OTHER_TURN, barriers.PAIR)
            scores = warpgroup_mma_wait(len(output), deps=[scores])
            barriers.arrive_at(K_EMPTY + stage_of(step + 1), WITH_BOTH)
            if block == blocks - 1:
                barriers.arrive(Q_EMPTY, WITH_ONE)
            scores = apply_mask(scores, mask, first_key, 1)
            p, state, alpha = attend(state, scores, scale_log2)
            p = computed_here(p)
            wait_v(shared, step + 1)
            output, p = out_tiles.wait_with(output, p)
            barriers.arrive_at(V_EMPTY + stage_of(step), WITH_BOTH)
            output = out_tiles.rescale(output, alpha)
            step += 1

        tiles_taken += 1
        operand = _operand(p, DTYPE)
        barriers.wait(MY_TURN, barriers.PAIR)
        output = out_tiles.start(shared, step, operand, output)
        # The next tile's first scores are under way while this one's output is stored.
        mbarrier.wait(mine.full.index(0), tiles_taken & 1)
        wait_k(shared, step + 1)
        scores = _start_scores(mine, shared, step + 1, p, D_QK)
        barriers.arrive(OTHER_TURN, barriers.PAIR)
        output = out_tiles.wait(chunks_of(D_QK) + len(shared.k) - 1, output)
        barriers.arrive_at(V_EMPTY + stage_of(step), WITH_BOTH)
        step += 1
        epilogue.store(output, state, ticket, call.results, scale_log2, FIRST_ROW, D_V, OUT_ALIGN)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barriers.arrive_at(K_EMPTY + stage_of(step), WITH_BOTH)
        blocks = opaque(read_ticket(mine.ticket).blocks)


@gluon.jit
def consume_first(call, D_QK: gl.constexpr, D_V: gl.constexpr, OUT_ALIGN: gl.constexpr):
    _consume(call, call.shared.first, TURN_FIRST, TURN_SECOND, Q_EMPTY_FIRST, 0, D_QK, D_V, OUT_ALIGN)
    # The second consumer's last arrival, which no turn waits for.
    barriers.wait(TURN_FIRST, barriers.PAIR)


@gluon.jit
def consume_second(call, D_QK: gl.constexpr, D_V: gl.constexpr, OUT_ALIGN: gl.constexpr):
    barriers.arrive(TURN_FIRST, barriers.PAIR)
    _consume(call, call.shared.second, TURN_SECOND, TURN_FIRST, Q_EMPTY_SECOND, ROWS, D_QK, D_V, OUT_ALIGN)
