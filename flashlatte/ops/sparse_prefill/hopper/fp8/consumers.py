"""The two consumers: the steps of each tile, and its results."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.e4m3 import steps
from flashlatte.kernels.hopper.e4m3.tiles import ROW_MAX1_FULL, SCORE_COLS, SCORE_ROWS, SLOT_EMPTY, SLOTS, TILE
from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, ROWS
from flashlatte.kernels.hopper.ptx.e4m3_values import thread_address
from flashlatte.kernels.hopper.ptx.registers import exp2, opaque
from flashlatte.ops.sparse_prefill.hopper.fp8.epilogue import start_store_out, store_statistics
from flashlatte.ops.sparse_prefill.hopper.state import num_selected, num_steps

# A layout in which every thread holds four elements.
_FOUR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def _begin_step(args, steps_taken, NUMBER: gl.constexpr, HAS_ROPE: gl.constexpr):
    """Scores [64, 64] of block NUMBER of a step, with -inf for keys that no index selected."""
    tiles, shared = args.tiles, args.shared
    slot = steps.slot_of(steps_taken, NUMBER)
    mbarrier.wait(tiles.full.index(slot), (steps_taken >> 1) & 1)
    lowest = gl.min(shared.min_indices.index(slot).load(_FOUR), 0)
    scores = steps.compute_scores(tiles, slot, steps_taken >> 30, HAS_ROPE)
    if lowest < 0:
        selected = shared.selected.index(slot).load(SCORE_COLS) != 0
        scores = gl.where(selected[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _release_output(steps_taken):
    """Release the slots of the previous step, from which the output has been stored."""
    tma.store_wait(0)
    slot = steps.slot_of(steps_taken - 1, 0)
    barriers.arrive_at(SLOT_EMPTY + slot, barriers.ALL_THREADS)
    barriers.arrive_at(SLOT_EMPTY + slot + 1, barriers.ALL_THREADS)


@gluon.jit
def consume(args, ODD: gl.constexpr, HAS_ROPE: gl.constexpr):
    for slot in gl.static_range(SLOTS):
        barriers.arrive(SLOT_EMPTY + slot, barriers.ALL_THREADS)
    tiles, shared, work = args.tiles, args.shared, args.work
    address = thread_address(tiles.k_offset + ODD * (HALF * KEYS))
    first = gl.program_id(0)
    next_steps = num_steps(num_selected(work, first))
    steps_taken = 0
    parity = 0
    for tile in range(first, work.tiles, gl.num_programs(0)):
        step_count = opaque(next_steps)
        next_steps = num_steps(num_selected(work, tile + gl.num_programs(0)))
        mbarrier.wait(shared.q_full, parity)
        factor = gl.maximum(shared.q_scales.index(parity).load(SCORE_ROWS) * args.scale, steps.SMALLEST_FACTOR)
        state = steps.empty_state()
        score_max = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
        for step in range(step_count):
            scores = _begin_step(args, steps_taken, ODD, HAS_ROPE)
            if (step == 0) & (steps_taken > 0):
                _release_output(steps_taken)
            score_max = gl.maximum(score_max, gl.max(scores, 1))
            # The output is stored from the slots of the last step. They are released after the next tile's first
            # scores.
            releases = step < step_count - 1
            state = steps.take_step(state, scores, tiles, factor, address, step == 0, releases, steps_taken, ODD)
            steps_taken += 1
        mbarrier.arrive(shared.q_empty, count=1)
        if ODD:
            tiles.row_sum1.store(state.row_sum)
        else:
            # The row_max of this step is that of block 0.
            barriers.wait(ROW_MAX1_FULL, barriers.PAIR_THREADS)
            row_max1 = tiles.row_max.index(steps.slot_of(steps_taken - 1, 1)).load(SCORE_ROWS)
            tiles.row_sum0.store(state.row_sum * exp2(state.row_max - row_max1))
            shared.score_max0.store(score_max)
        barriers.wait(TILE, barriers.PAIR_THREADS)
        start_store_out(args, state.out, tile, steps.slot_of(steps_taken - 1, 1), ODD)
        if ODD:
            score_max = gl.maximum(score_max, shared.score_max0.load(SCORE_ROWS))
            store_statistics(args, state.row_max, score_max, factor, tile)
        parity ^= 1
    _release_output(steps_taken)
