"""The two consumers: four warps each, with 64 query rows each and the same blocks of keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.ptx.registers import computed_here, opaque, round_here
from flashlatte.kernels.hopper.softmax import rescale
from flashlatte.kernels.hopper.two_consumers import (
    CHUNK,
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
    read_number,
    stage_of,
    wait_k,
    wait_v,
)
from flashlatte.ops.paged_attention.hopper import epilogue, foreign_keys
from flashlatte.ops.paged_attention.hopper.tiles import (
    KEYS,
    SCORES,
    output_layout,
    read_ticket,
    values_of,
)


@gluon.jit
def _start_scores(mine, shared, step, unused, CHUNKS: gl.constexpr):
    """Start q · k of the block of a step, which has come. ``unused`` [64, 128] lends its registers."""
    # Not a constant to the compiler, which would hoist the descriptors of all chunks out of the loop, and spill them.
    zero = step >> 30
    scores = unused
    for chunk in gl.static_range(CHUNKS):
        q = mine.q.index(chunk + zero)
        k = shared.k.index(stage_of(step) * CHUNKS + chunk)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=chunk > 0, is_async=True)
    return scores


@gluon.jit
def _start_output(shared, step, p, output):
    """Start P · v of the block of a step, which has come."""
    return warpgroup_mma(p, values_of(shared, step), output, is_async=True)


@gluon.jit
def _operand(p, DTYPE: gl.constexpr, OUTPUT: gl.constexpr):
    """P as an operand. Rounded here and not later, as scores take its registers next."""
    return gl.convert_layout(round_here(p, DTYPE), gl.DotOperandLayout(0, OUTPUT, 2), assert_trivial=True)


@gluon.jit
def _hide_foreign_values(shared, step, ticket, first_key):
    """Zero what a block has outside of the keys that the tile's queries see."""
    if (first_key < ticket.first_key) | (first_key + KEYS > ticket.keys):
        tile = shared.v.index(stage_of(step))
        foreign_keys.zero_values(tile, ticket.first_key - first_key, ticket.keys - first_key)


@gluon.jit
def _consume(
    call,
    mine,
    MY_TURN: gl.constexpr,
    OTHER_TURN: gl.constexpr,
    Q_EMPTY: gl.constexpr,
    FIRST_ROW: gl.constexpr,
    PLAN: gl.constexpr,
):
    shared = call.shared
    DTYPE: gl.constexpr = shared.v.dtype
    CHUNKS: gl.constexpr = PLAN.chunks
    OUTPUT: gl.constexpr = output_layout(PLAN.v_chunks)
    scale_log2 = call.scale_log2
    barriers.arrive(Q_EMPTY, WITH_ONE)
    for stage in gl.static_range(STAGES):
        barriers.arrive_at(K_EMPTY + stage, WITH_BOTH)
        barriers.arrive_at(V_EMPTY + stage, WITH_BOTH)

    step = 0
    tiles_taken = 0
    mbarrier.wait(mine.full.index(0), 0)
    wait_k(shared, step)
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = _start_scores(mine, shared, step, scores, CHUNKS)
    absent = read_number(shared.absent, stage_of(step))
    scores = warpgroup_mma_wait(0, deps=[scores])
    barriers.arrive_at(K_EMPTY, WITH_BOTH)
    blocks = read_number(mine.ticket, 0)
    while blocks > 0:
        ticket = read_ticket(mine.ticket)
        mask = mask_of(ticket, call.window, FIRST_ROW, PLAN.pack)
        first_key = ticket.last * KEYS
        scores = foreign_keys.hide_absent(apply_mask(scores, mask, first_key, PLAN.pack), absent)
        p, state, alpha = attend(empty_state(SCORES), scores, scale_log2)
        output = gl.zeros([ROWS, PLAN.v_chunks * CHUNK], gl.float32, OUTPUT)
        wait_v(shared, step)
        _hide_foreign_values(shared, step, ticket, first_key)

        if blocks == 1:
            barriers.arrive(Q_EMPTY, WITH_ONE)
        for block in range(1, opaque(blocks)):
            first_key -= KEYS
            operand = _operand(p, DTYPE, OUTPUT)
            wait_k(shared, step + 1)
            barriers.wait(MY_TURN, barriers.PAIR)
            scores = _start_scores(mine, shared, step + 1, p, CHUNKS)
            output = _start_output(shared, step, operand, output)
            barriers.arrive(OTHER_TURN, barriers.PAIR)
            absent = read_number(shared.absent, stage_of(step + 1))
            scores = warpgroup_mma_wait(1, deps=[scores])
            barriers.arrive_at(K_EMPTY + stage_of(step + 1), WITH_BOTH)
            if block == blocks - 1:
                barriers.arrive(Q_EMPTY, WITH_ONE)
            scores = foreign_keys.hide_absent(apply_mask(scores, mask, first_key, PLAN.pack), absent)
            p, state, alpha = attend(state, scores, scale_log2)
            p = computed_here(p)
            wait_v(shared, step + 1)
            # With P, so that it is not rounded before: the operand of the product would have to be kept.
            output, p = warpgroup_mma_wait(0, deps=[output, p])
            barriers.arrive_at(V_EMPTY + stage_of(step), WITH_BOTH)
            _hide_foreign_values(shared, step + 1, ticket, first_key)
            output = rescale(output, alpha)
            step += 1

        tiles_taken += 1
        operand = _operand(p, DTYPE, OUTPUT)
        barriers.wait(MY_TURN, barriers.PAIR)
        output = _start_output(shared, step, operand, output)
        # The next tile's first scores are under way while this one's output is stored.
        mbarrier.wait(mine.full.index(0), tiles_taken & 1)
        wait_k(shared, step + 1)
        scores = _start_scores(mine, shared, step + 1, p, CHUNKS)
        barriers.arrive(OTHER_TURN, barriers.PAIR)
        absent = read_number(shared.absent, stage_of(step + 1))
        output = warpgroup_mma_wait(CHUNKS, deps=[output])
        barriers.arrive_at(V_EMPTY + stage_of(step), WITH_BOTH)
        step += 1
        epilogue.store(output, state, ticket, call.results, scale_log2, FIRST_ROW, PLAN)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barriers.arrive_at(K_EMPTY + stage_of(step), WITH_BOTH)
        blocks = read_number(mine.ticket, 0)


@gluon.jit
def consume_first(call, PLAN: gl.constexpr):
    _consume(call, call.shared.first, TURN_FIRST, TURN_SECOND, Q_EMPTY_FIRST, 0, PLAN)
    # The other one's last arrival.
    barriers.wait(TURN_FIRST, barriers.PAIR)


@gluon.jit
def consume_second(call, PLAN: gl.constexpr):
    barriers.arrive(TURN_FIRST, barriers.PAIR)
    _consume(call, call.shared.second, TURN_SECOND, TURN_FIRST, Q_EMPTY_SECOND, ROWS, PLAN)
