"""The consumers' steps: each computes the scores of one block of a step, and half of the columns of the transposed
output.

```
                time →
even consumer   scores 0 | softmax 0 | + block 0 | + block 1 | scores 0 of the next step …
odd consumer    scores 1 | softmax 1 | + block 0 | + block 1 | scores 1 of the next step …
```

row_max goes even → odd → even once a step, before P is computed.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.fp8_attention import P_EXPONENT, P_MARGIN
from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.e4m3.tiles import (
    P0_FULL,
    P1_FULL,
    ROW_MAX0_FULL,
    ROW_MAX1_FULL,
    SCORE_COLS,
    SCORE_ROWS,
    SCORES,
    SLOT_EMPTY,
    VALUES,
    latent_of,
    rope_of,
)
from flashlatte.kernels.hopper.mla_tiles import KEYS, LATENT, ROWS
from flashlatte.kernels.hopper.ptx.e4m3_values import load_columns, rescale_columns
from flashlatte.kernels.hopper.ptx.registers import exp2
from flashlatte.kernels.hopper.softmax import NO_SCORE, ConsumerState
from flashlatte.runtime.gluon_compat import cta_barrier

# P is relative to row_max - OFFSET; row_max is raised only if a block exceeds it by more than MARGIN.
OFFSET = gl.constexpr(P_EXPONENT)
MARGIN = gl.constexpr(P_MARGIN)
# Lower bound of the factor of scores, above 0 so that masked scores stay -inf.
SMALLEST_FACTOR = gl.constexpr(1e-37)
# Bytes of a block's latents.
BLOCK_BYTES = gl.constexpr(KEYS.value * LATENT.value)


@gluon.jit
def empty_state():
    """The state of a consumer before its first block: out is four tiles [64 columns, 64 rows]."""
    zeros = gl.zeros([64, ROWS], gl.float32, SCORES)
    return ConsumerState(
        (zeros, zeros, zeros, zeros),
        gl.full([ROWS], NO_SCORE, gl.float32, SCORE_ROWS),
        gl.zeros([ROWS], gl.float32, SCORE_ROWS),
    )


@gluon.jit
def slot_of(steps_taken, NUMBER: gl.constexpr):
    """The slot of block NUMBER of a step."""
    return (steps_taken & 1) * 2 + NUMBER


@gluon.jit
def compute_scores(tiles, slot, zero, HAS_ROPE: gl.constexpr):
    """Scores [64, 64] of a block, in units of both scales. ``zero``: 0, opaque to the compiler
    (``mla_tiles.MlaTiles``)."""
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    k = latent_of(tiles.k, slot).permute((1, 0))
    scores = warpgroup_mma(latent_of(tiles.q, zero), k, scores, use_acc=False, is_async=True)
    if HAS_ROPE:
        k_rope = rope_of(tiles.k, slot).permute((1, 0))
        scores = warpgroup_mma(rope_of(tiles.q, zero), k_rope, scores, is_async=True)
        scores = warpgroup_mma(rope_of(tiles.q, zero + 1), k_rope, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _raise_row_max(row_max, scores, factor):
    block_max = gl.max(scores, 1) * factor
    return gl.where(block_max - row_max > MARGIN, block_max, row_max)


@gluon.jit
def _publish_p(p, target):
    """Store P [64 rows, 64 keys] in the order of ``ptx.e4m3_values``."""
    p = p.reshape([ROWS, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, KEYS])
    target.store(p.to(gl.float8e4nv))
    fence_async_shared()
    cta_barrier()


@gluon.jit
def _load_values(address, slot):
    """A consumer's columns of a block's values, transposed: four operands [64 columns, 64 keys]."""
    of_slot = address + slot * BLOCK_BYTES
    return (
        load_columns(of_slot, 0, VALUES),
        load_columns(of_slot, 1, VALUES),
        load_columns(of_slot, 2, VALUES),
        load_columns(of_slot, 3, VALUES),
    )


@gluon.jit
def _add_block(out, values, tiles, slot, releases):
    """``out`` times alpha, plus the values of a block times its P; if ``releases``, release the slot."""
    out = rescale_columns(out, tiles.alpha.index(slot).load(SCORE_COLS))
    p = tiles.p.index(slot).permute((1, 0))
    out0 = warpgroup_mma(values[0], p, out[0], is_async=True)
    out1 = warpgroup_mma(values[1], p, out[1], is_async=True)
    out2 = warpgroup_mma(values[2], p, out[2], is_async=True)
    out3 = warpgroup_mma(values[3], p, out[3], is_async=True)
    out = warpgroup_mma_wait(0, deps=[out0, out1, out2, out3])
    if releases:
        barriers.arrive_at(SLOT_EMPTY + slot, barriers.ALL_THREADS)
    return out


@gluon.jit
def take_step(state, scores, tiles, factor, address, is_first, releases, steps_taken, ODD: gl.constexpr):
    """A step of either consumer, given the scores of its block, which adds block 0 and then block 1.

    The even consumer does not wait for the odd one's softmax, because it adds block 0 first.

    Args:
        factor: [64], of the scores of each row: softmax_scale · log2(e) and the scales of q and keys.
        address: address of the values in shared memory (``e4m3_values.thread_address``).
        is_first: whether it is the first step of the queries.
        releases: whether to release the slots of both blocks.
    """
    slot = slot_of(steps_taken, ODD)
    slot0 = slot_of(steps_taken, 0)
    # row_max of the previous block.
    row_max = state.row_max
    if ODD:
        barriers.wait(ROW_MAX0_FULL, barriers.PAIR_THREADS)
        row_max = tiles.row_max.index(slot0).load(SCORE_ROWS)
    else:
        if not is_first:
            barriers.wait(ROW_MAX1_FULL, barriers.PAIR_THREADS)
            row_max = tiles.row_max.index((slot ^ 2) + 1).load(SCORE_ROWS)
    raised = _raise_row_max(row_max, scores, factor)
    tiles.row_max.index(slot).store(raised)
    tiles.alpha.index(slot).store(exp2(row_max - raised))
    barriers.arrive(ROW_MAX1_FULL if ODD else ROW_MAX0_FULL, barriers.PAIR_THREADS)
    p = exp2(scores * factor[:, None] - (raised - OFFSET)[:, None])
    row_sum = state.row_sum * exp2(state.row_max - raised) + gl.sum(p, 1)
    _publish_p(p, tiles.p.index(slot))
    barriers.arrive_at((P1_FULL if ODD else P0_FULL) + (steps_taken & 1), barriers.PAIR_THREADS)
    values = _load_values(address, slot0)
    if ODD:
        barriers.wait_at(P0_FULL + (steps_taken & 1), barriers.PAIR_THREADS)
    out = _add_block(state.out, values, tiles, slot0, releases)
    if not ODD:
        # Wait before the values are loaded: only the odd consumer has waited for block 1.
        barriers.wait_at(P1_FULL + (steps_taken & 1), barriers.PAIR_THREADS)
    out = _add_block(out, _load_values(address, slot0 + 1), tiles, slot0 + 1, releases)
    return ConsumerState(out, raised, row_sum)


@gluon.jit
def in_order(tile):
    """A tile of the output [64 columns, 64 rows] as [64 rows, 64 columns], in the order of the columns
    (``ptx.e4m3_values``). No values move."""
    return tile.reshape([4, 2, 8, ROWS]).permute((3, 0, 2, 1)).reshape([ROWS, 64])
