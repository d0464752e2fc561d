"""The two consumers: four warps each, with 64 query rows each and the same blocks of keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import named_barriers
from flashlatte.kernels.hopper.lazy_softmax import rescale
from flashlatte.ops.dense_prefill.hopper.forward import barriers, epilogue, softmax
from flashlatte.ops.dense_prefill.hopper.forward.tiles import (
    ACCUMULATOR,
    KEYS,
    ROWS,
    STAGES,
    VALUES,
    WEIGHT_OPERAND,
    phase_of,
    read_ticket,
    stage_of,
)


class Window(NamedTuple):
    """Keys before and behind its own position that a query sees."""

    left: Any
    right: Any


class Call(NamedTuple):
    """What stays the same over all tiles. ``scale_log2`` is softmax_scale · log2(e)."""

    shared: Any
    window: Any
    scale_log2: Any
    results: Any


@gluon.jit
def _kept(number):
    """The same number, used in a way that Triton 3.6 and 3.7 see.

    Their elimination of dead loop arguments overlooks the bounds of inner loops (triton-lang/triton#9036).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_k(shared, step):
    mbarrier.wait(shared.k_ready.index(stage_of(step)), phase_of(step))


@gluon.jit
def _wait_v(shared, step):
    mbarrier.wait(shared.v_ready.index(stage_of(step)), phase_of(step))


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
def _start_output(shared, step, weights, output):
    """Start weights · v of the block of a step, which has come."""
    return warpgroup_mma(weights, shared.v.index(stage_of(step)), output, is_async=True)


@gluon.jit
def _settled(weights):
    """The same weights, computed before the volatile assembly that follows."""
    return gl.inline_asm_elementwise("", _settled_constraints(), [weights], gl.float32, is_pure=False, pack=64)


@gluon.constexpr_function
def _settled_constraints():
    return ",".join(["=f"] * 64 + [str(i) for i in range(64)])


@gluon.jit
def _operand(weights, DTYPE: gl.constexpr):
    """Weights as an operand. Rounded by volatile assembly, so here and not later: scores take their registers next."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [weights], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [weights], gl.float16, is_pure=False, pack=2
        )
    return gl.convert_layout(rounded, WEIGHT_OPERAND)


@gluon.jit
def _consume(
    call,
    mine,
    MY_TURN: gl.constexpr,
    OTHER_TURN: gl.constexpr,
    Q_FREE: gl.constexpr,
    FIRST_ROW: gl.constexpr,
    CHUNKS: gl.constexpr,
    UNIT: gl.constexpr,
):
    shared = call.shared
    DTYPE: gl.constexpr = shared.v.dtype
    scale_log2 = call.scale_log2
    named_barriers.arrive(Q_FREE, barriers.PAIR)
    for stage in gl.static_range(STAGES):
        barriers.arrive_stage(barriers.K_FREE, stage)
        barriers.arrive_stage(barriers.V_FREE, stage)

    step = 0
    tiles_taken = 0
    mbarrier.wait(mine.ready.index(0), 0)
    _wait_k(shared, step)
    scores = gl.zeros([ROWS, KEYS], gl.float32, ACCUMULATOR)
    scores = _start_scores(mine, shared, step, scores, CHUNKS)
    scores = warpgroup_mma_wait(0, deps=[scores])
    barriers.arrive_stage(barriers.K_FREE, 0)
    ticket = read_ticket(mine.ticket)
    blocks = ticket.blocks
    while blocks > 0:
        ticket = read_ticket(mine.ticket)
        seen = softmax.sight(ticket, call.window, FIRST_ROW)
        first_key = ticket.last * KEYS
        scores = softmax.hide(scores, seen, first_key)
        weights, state, decay = softmax.attend(softmax.empty_state(), scores, scale_log2)
        output = gl.zeros([ROWS, VALUES], gl.float32, ACCUMULATOR)
        _wait_v(shared, step)
        if first_key + KEYS > ticket.keys:
            softmax.zero_values(shared.v.index(stage_of(step)), ticket.keys - first_key)

        if blocks == 1:
            named_barriers.arrive(Q_FREE, barriers.PAIR)
        for block in range(1, _kept(blocks)):
            first_key -= KEYS
            operand = _operand(weights, DTYPE)
            _wait_k(shared, step + 1)
            named_barriers.wait(MY_TURN, barriers.PAIR)
            scores = _start_scores(mine, shared, step + 1, weights, CHUNKS)
            output = _start_output(shared, step, operand, output)
            named_barriers.arrive(OTHER_TURN, barriers.PAIR)
            scores = warpgroup_mma_wait(1, deps=[scores])
            barriers.arrive_stage(barriers.K_FREE, stage_of(step + 1))
            if block == blocks - 1:
                named_barriers.arrive(Q_FREE, barriers.PAIR)
            scores = softmax.hide(scores, seen, first_key)
            weights, state, decay = softmax.attend(state, scores, scale_log2)
            weights = _settled(weights)
            _wait_v(shared, step + 1)
            # With the weights, so that they are not rounded before: the operand of the product would have to be kept.
            output, weights = warpgroup_mma_wait(0, deps=[output, weights])
            barriers.arrive_stage(barriers.V_FREE, stage_of(step))
            output = rescale(output, decay[:, None])
            step += 1

        tiles_taken += 1
        operand = _operand(weights, DTYPE)
        named_barriers.wait(MY_TURN, barriers.PAIR)
        output = _start_output(shared, step, operand, output)
        # The next tile's first scores are under way while this one's output is stored.
        mbarrier.wait(mine.ready.index(0), tiles_taken & 1)
        _wait_k(shared, step + 1)
        scores = _start_scores(mine, shared, step + 1, weights, CHUNKS)
        named_barriers.arrive(OTHER_TURN, barriers.PAIR)
        output = warpgroup_mma_wait(CHUNKS, deps=[output])
        barriers.arrive_stage(barriers.V_FREE, stage_of(step))
        step += 1
        epilogue.store(output, state, ticket, call.results, scale_log2, FIRST_ROW, UNIT)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barriers.arrive_stage(barriers.K_FREE, stage_of(step))
        blocks = _kept(read_ticket(mine.ticket).blocks)


@gluon.jit
def consume_first(call, CHUNKS: gl.constexpr, UNIT: gl.constexpr):
    _consume(
        call,
        call.shared.first,
        barriers.TURN_FIRST,
        barriers.TURN_SECOND,
        barriers.Q_FREE_FIRST,
        0,
        CHUNKS,
        UNIT,
    )
    # The other one's last arrival.
    named_barriers.wait(barriers.TURN_FIRST, barriers.PAIR)


@gluon.jit
def consume_second(call, CHUNKS: gl.constexpr, UNIT: gl.constexpr):
    named_barriers.arrive(barriers.TURN_FIRST, barriers.PAIR)
    _consume(
        call,
        call.shared.second,
        barriers.TURN_SECOND,
        barriers.TURN_FIRST,
        barriers.Q_FREE_SECOND,
        ROWS,
        CHUNKS,
        UNIT,
    )
