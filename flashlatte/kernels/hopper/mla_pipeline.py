"""The pipeline of absorbed MLA on Hopper: a producer fills blocks of keys, two consumers score them and sum the values.

A consumer owns half of the output's columns, and scores one block of a step's two; both need P of both blocks, and the
same row_max for it, which goes from the even consumer to the odd one and back, once a step:

```
                time →
even consumer   scores 0 | softmax 0 |  P0·V0 left  | ······ |  P1·V1 left  | scores 0 of the next step …
odd consumer        scores 1           | P0·V0 right | softmax 1 | P1·V1 right | ······ | scores 1 …
producer        halves of the next step's blocks, each as soon as its last reader lets go of it
```

The odd consumer queues P0·V0 behind its scores, and computes its softmax under that product. P is published before the
consumer's own product with it: a warp that issues a product waits until the tensor cores take it. A half is let go at
once after its last product.

Row sums are best taken under a product (up to 2%), but P in float32 then stays in 32 registers beside the output:
consumers with 240 registers have them, with 192 the loop spills. ``SUM_FIRST`` takes the sums before P is published.

An operation brings its producer, its mask, and its range of work. A step of its consumers is

    even:  scores of block 0, masked;  ``attend_even``
    odd:   scores of block 1 begun;  ``begin_odd``;  scores waited for, masked;  ``attend_odd``

with a ``call`` that has the fields ``tiles`` (``mla_tiles.Tiles``, which explains ``zero``), ``scale``
(softmax_scale · log2(e)) and ``peer``, the peer CTA that reads what this one's producer fills, and the other way round
(``clusters.Cluster``), or None.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from flashlatte.kernels.hopper import barriers, clusters
from flashlatte.kernels.hopper.mla_tiles import (
    HALF,
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    P0_FULL,
    P1_FULL,
    ROW_MAX1_FULL,
    ROWS,
    SCORE_ROWS,
)
from flashlatte.kernels.hopper.softmax import NO_SCORE, State, probabilities, raise_row_max, rescale


@gluon.jit
def empty_state(OUTPUT: gl.constexpr):
    """A consumer's half of an output in this layout, before the first key."""
    return State(
        gl.zeros([ROWS, HALF], gl.float32, OUTPUT),
        gl.full([ROWS], NO_SCORE, gl.float32, SCORE_ROWS),
        gl.zeros([ROWS], gl.float32, SCORE_ROWS),
    )


@gluon.jit
def release(call, EMPTY: gl.constexpr, PRODUCER_THREADS: gl.constexpr):
    """Let half of a block be filled again: by this CTA's producer, in a cluster by the peer's as well."""
    if call.peer is not None:
        clusters.release(EMPTY, call.peer)
    else:
        barriers.arrive(EMPTY, 128 + PRODUCER_THREADS)


@gluon.jit
def wait_empty(EMPTY: gl.constexpr, PRODUCER_THREADS: gl.constexpr, peer=None, phase=0):
    """Wait until half of a block may be filled again; with a ``peer``, here and there. ``phase`` is of its mbarrier."""
    if peer is not None:
        clusters.wait(EMPTY, peer, phase)
    else:
        barriers.wait(EMPTY, 128 + PRODUCER_THREADS, PRODUCER_THREADS)


@gluon.jit
def finish_producing(PRODUCER_THREADS: gl.constexpr, peer=None, phase=0):
    """When the last block is under way: wait for the consumers' last arrivals, and let the next kernel be launched.

    The next kernel combines partial outputs, and itself waits for what the consumers still write. Launched earlier, its
    CTAs would crowd on the few SMs that are free first.
    """
    wait_empty(K0_LEFT_EMPTY, PRODUCER_THREADS, peer, phase)
    wait_empty(K0_RIGHT_EMPTY, PRODUCER_THREADS, peer, phase)
    wait_empty(K1_RIGHT_EMPTY, PRODUCER_THREADS, peer, phase)
    wait_empty(K1_LEFT_EMPTY, PRODUCER_THREADS, peer, phase)
    gdc_launch_dependents()


@gluon.jit
def attend_even(
    scores,
    state,
    call,
    zero,
    PRODUCER_THREADS: gl.constexpr,
    SUM_FIRST: gl.constexpr,
    LAST: gl.constexpr = False,
):
    """From masked ``scores`` [64, 64] of block 0 to the left half of the output, of both blocks.

    After ``LAST`` the row sum is that of both consumers, whose sums pass with P, and block 1's left half is not let go.
    """
    tiles = call.tiles
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, state.out.type.layout, 2)
    k0_left = tiles.k0.left.index(zero)
    row_max0 = raise_row_max(state.row_max, scores, call.scale)
    tiles.row_max0.store(row_max0)
    p = probabilities(scores, row_max0, call.scale)
    p_rounded = p.to(k0_left.dtype)
    tiles.p0.index(zero).store(p_rounded)
    if SUM_FIRST:
        row_sum = state.row_sum * gl.exp2(state.row_max - row_max0) + gl.sum(p, 1)
    if LAST:
        tiles.row_sum0.store(state.row_sum * gl.exp2(state.row_max - row_max0) + gl.sum(p, 1))
    fence_async_shared()
    barriers.arrive(P0_FULL, barriers.PAIR)
    alpha = gl.exp2(state.row_max - row_max0)
    out = rescale(state.out, alpha)
    operand = gl.convert_layout(p_rounded, P_OPERAND)
    out = warpgroup_mma(operand, k0_left, out, is_async=True)
    if not SUM_FIRST:
        row_sum = state.row_sum * alpha + gl.sum(p, 1)
    out = warpgroup_mma_wait(0, deps=[out])
    release(call, K0_LEFT_EMPTY, PRODUCER_THREADS)

    barriers.wait(ROW_MAX1_FULL, barriers.PAIR)
    row_max1 = tiles.row_max1.load(SCORE_ROWS)
    alpha = gl.exp2(row_max0 - row_max1)
    row_sum = row_sum * alpha
    out = rescale(out, alpha)
    barriers.wait(P1_FULL, barriers.PAIR)
    out = warpgroup_mma(tiles.p1.index(zero), tiles.k1.left.index(zero), out, is_async=True)
    if LAST:
        row_sum += tiles.row_sum1.load(SCORE_ROWS)
    out = warpgroup_mma_wait(0, deps=[out])
    if not LAST:
        release(call, K1_LEFT_EMPTY, PRODUCER_THREADS)
    return State(out, row_max1, row_sum)


@gluon.jit
def begin_odd(state, call, zero):
    """Queue block 0's product with the right half of its values behind the scores of block 1.

    Returns the output [64, 256] that is under way, and row_max [64] of block 0.
    """
    tiles = call.tiles
    barriers.wait(P0_FULL, barriers.PAIR)
    row_max0 = tiles.row_max0.load(SCORE_ROWS)
    out = rescale(state.out, gl.exp2(state.row_max - row_max0))
    return warpgroup_mma(tiles.p0.index(zero), tiles.k0.right.index(zero), out, is_async=True), row_max0


@gluon.jit
def attend_odd(scores, out, row_max0, state, call, zero, PRODUCER_THREADS: gl.constexpr, SUM_FIRST: gl.constexpr):
    """From masked ``scores`` [64, 64] of block 1, and what ``begin_odd`` returned, to the right half of the output."""
    tiles = call.tiles
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, state.out.type.layout, 2)
    k1_right = tiles.k1.right.index(zero)
    row_max1 = raise_row_max(row_max0, scores, call.scale)
    tiles.row_max1.store(row_max1)
    barriers.arrive(ROW_MAX1_FULL, barriers.PAIR)
    p = probabilities(scores, row_max1, call.scale)
    p_rounded = p.to(k1_right.dtype)
    tiles.p1.index(zero).store(p_rounded)
    if SUM_FIRST:
        row_sum = state.row_sum * gl.exp2(state.row_max - row_max1) + gl.sum(p, 1)
    fence_async_shared()
    barriers.arrive(P1_FULL, barriers.PAIR)
    operand = gl.convert_layout(p_rounded, P_OPERAND)
    alpha = gl.exp2(row_max0 - row_max1)
    out = warpgroup_mma_wait(0, deps=[out])
    release(call, K0_RIGHT_EMPTY, PRODUCER_THREADS)
    out = rescale(out, alpha)
    out = warpgroup_mma(operand, k1_right, out, is_async=True)
    if not SUM_FIRST:
        row_sum = state.row_sum * gl.exp2(state.row_max - row_max1) + gl.sum(p, 1)
    out = warpgroup_mma_wait(0, deps=[out])
    release(call, K1_RIGHT_EMPTY, PRODUCER_THREADS)
    return State(out, row_max1, row_sum)


@gluon.jit
def add_other_sum(state, own, other):
    """After a work item's last step: the state with the row sum of both consumers."""
    own.store(state.row_sum)
    # P0_FULL serves once more, to say that both sums are stored: no P of block 0 is waited for any more.
    barriers.wait(P0_FULL, barriers.PAIR)
    return State(state.out, state.row_max, state.row_sum + other.load(SCORE_ROWS))
