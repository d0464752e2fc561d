"""The pipeline of absorbed MLA on Hopper: one producer loads blocks of keys, and two consumers compute scores and
output.

Each step processes two blocks. Each consumer holds half of the output's columns and computes the scores of one block.
Both consumers need P of both blocks, relative to the same row_max, which the even consumer passes to the odd one and
the odd one back once a step:

```
                time →
even consumer   scores 0 | softmax 0 |  P0·V0 left  | ······ |  P1·V1 left  | scores 0 of the next step …
odd consumer        scores 1           | P0·V0 right | softmax 1 | P1·V1 right | ······ | scores 1 …
producer        halves of the next step's blocks, each as soon as its last reader releases it
```

The odd consumer issues P0·V0 after its scores and computes its softmax during that product. A consumer publishes P
before its own product with P, because a warp that issues a product stalls until the tensor cores accept it. A consumer
releases a half right after the last product that reads it.

Summing the rows of P during a product is up to 2% faster, but keeps P in float32 in 32 registers next to the output.
Consumers with 240 registers have room; with 192 the loop spills. ``SUM_FIRST`` computes the sums before P is published.

An operation supplies the producer, the mask and the schedule. A step of its consumers is

    even:  scores of block 0, masked;  ``attend_even``
    odd:   start scores of block 1;  ``begin_odd``;  wait for the scores and mask them;  ``attend_odd``

``args`` has the fields ``tiles`` (``mla_tiles.MlaTiles``, which explains ``zero``), ``scale`` (softmax_scale · log2(e))
and ``peer``: the ``clusters.ClusterAddresses`` of a cluster whose two CTAs share dequantized keys, or None.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportUnboundVariable=false

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
from flashlatte.kernels.hopper.softmax import NO_SCORE, ConsumerState, probabilities, raise_row_max, rescale


@gluon.jit
def empty_state(OUTPUT: gl.constexpr):
    """The initial state of a consumer, with an output of layout OUTPUT."""
    return ConsumerState(
        gl.zeros([ROWS, HALF], gl.float32, OUTPUT),
        gl.full([ROWS], NO_SCORE, gl.float32, SCORE_ROWS),
        gl.zeros([ROWS], gl.float32, SCORE_ROWS),
    )


@gluon.jit
def release(args, EMPTY: gl.constexpr, PRODUCER_THREADS: gl.constexpr):
    """Release half of a block to this CTA's producer, and in a cluster to the peer's producer as well."""
    if args.peer is not None:
        clusters.release(EMPTY, args.peer)
    else:
        barriers.arrive(EMPTY, 128 + PRODUCER_THREADS)


@gluon.jit
def wait_empty(EMPTY: gl.constexpr, PRODUCER_THREADS: gl.constexpr, peer=None, phase=0):
    """Wait until half of a block is empty; with a ``peer``, in both CTAs. ``phase``: phase of the mbarrier."""
    if peer is not None:
        clusters.wait(EMPTY, peer, phase)
    else:
        barriers.wait(EMPTY, 128 + PRODUCER_THREADS, PRODUCER_THREADS)


@gluon.jit
def finish_producer(PRODUCER_THREADS: gl.constexpr, peer=None, phase=0):
    """After the last block has been issued: wait for the consumers' last arrivals, and allow the next kernel to launch.

    The next kernel combines partial outputs and waits for this kernel's writes itself. Launched earlier, its CTAs would
    all run on the few SMs that become free first.
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
    args,
    zero,
    PRODUCER_THREADS: gl.constexpr,
    SUM_FIRST: gl.constexpr,
    LAST: gl.constexpr = False,
):
    """Add both blocks to the left half of the output, given the masked ``scores`` [64, 64] of block 0.

    With ``LAST``, the consumers exchange row sums together with P, the returned row_sum is the total of both, and the
    left half of block 1 is not released.
    """
    tiles = args.tiles
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, state.out.type.layout, 2)
    k0_left = tiles.k0.left.index(zero)
    row_max0 = raise_row_max(state.row_max, scores, args.scale)
    tiles.row_max0.store(row_max0)
    p = probabilities(scores, row_max0, args.scale)
    p_rounded = p.to(k0_left.dtype)
    tiles.p0.index(zero).store(p_rounded)
    if SUM_FIRST:
        row_sum = state.row_sum * gl.exp2(state.row_max - row_max0) + gl.sum(p, 1)
    if LAST:
        tiles.row_sum0.store(state.row_sum * gl.exp2(state.row_max - row_max0) + gl.sum(p, 1))
    fence_async_shared()
    barriers.arrive(P0_FULL, barriers.PAIR_THREADS)
    alpha = gl.exp2(state.row_max - row_max0)
    out = rescale(state.out, alpha)
    operand = gl.convert_layout(p_rounded, P_OPERAND)
    out = warpgroup_mma(operand, k0_left, out, is_async=True)
    if not SUM_FIRST:
        row_sum = state.row_sum * alpha + gl.sum(p, 1)
    out = warpgroup_mma_wait(0, deps=[out])
    release(args, K0_LEFT_EMPTY, PRODUCER_THREADS)

    barriers.wait(ROW_MAX1_FULL, barriers.PAIR_THREADS)
    row_max1 = tiles.row_max1.load(SCORE_ROWS)
    alpha = gl.exp2(row_max0 - row_max1)
    row_sum = row_sum * alpha
    out = rescale(out, alpha)
    barriers.wait(P1_FULL, barriers.PAIR_THREADS)
    out = warpgroup_mma(tiles.p1.index(zero), tiles.k1.left.index(zero), out, is_async=True)
    if LAST:
        row_sum += tiles.row_sum1.load(SCORE_ROWS)
    out = warpgroup_mma_wait(0, deps=[out])
    if not LAST:
        release(args, K1_LEFT_EMPTY, PRODUCER_THREADS)
    return ConsumerState(out, row_max1, row_sum)


@gluon.jit
def begin_odd(state, args, zero):
    """Issue P of block 0 times the right half of its values, after the scores of block 1.

    Returns the pending output [64, 256] and row_max [64] of block 0.
    """
    tiles = args.tiles
    barriers.wait(P0_FULL, barriers.PAIR_THREADS)
    row_max0 = tiles.row_max0.load(SCORE_ROWS)
    out = rescale(state.out, gl.exp2(state.row_max - row_max0))
    return warpgroup_mma(tiles.p0.index(zero), tiles.k0.right.index(zero), out, is_async=True), row_max0


@gluon.jit
def attend_odd(scores, out, row_max0, state, args, zero, PRODUCER_THREADS: gl.constexpr, SUM_FIRST: gl.constexpr):
    """Add both blocks to the right half of the output, given the masked ``scores`` [64, 64] of block 1 and the results
    of ``begin_odd``."""
    tiles = args.tiles
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, state.out.type.layout, 2)
    k1_right = tiles.k1.right.index(zero)
    row_max1 = raise_row_max(row_max0, scores, args.scale)
    tiles.row_max1.store(row_max1)
    barriers.arrive(ROW_MAX1_FULL, barriers.PAIR_THREADS)
    p = probabilities(scores, row_max1, args.scale)
    p_rounded = p.to(k1_right.dtype)
    tiles.p1.index(zero).store(p_rounded)
    if SUM_FIRST:
        row_sum = state.row_sum * gl.exp2(state.row_max - row_max1) + gl.sum(p, 1)
    fence_async_shared()
    barriers.arrive(P1_FULL, barriers.PAIR_THREADS)
    operand = gl.convert_layout(p_rounded, P_OPERAND)
    alpha = gl.exp2(row_max0 - row_max1)
    out = warpgroup_mma_wait(0, deps=[out])
    release(args, K0_RIGHT_EMPTY, PRODUCER_THREADS)
    out = rescale(out, alpha)
    out = warpgroup_mma(operand, k1_right, out, is_async=True)
    if not SUM_FIRST:
        row_sum = state.row_sum * gl.exp2(state.row_max - row_max1) + gl.sum(p, 1)
    out = warpgroup_mma_wait(0, deps=[out])
    release(args, K1_RIGHT_EMPTY, PRODUCER_THREADS)
    return ConsumerState(out, row_max1, row_sum)


@gluon.jit
def add_row_sums(state, own, other):
    """Replace row_sum by the sum over both consumers, after the last step of a work item."""
    own.store(state.row_sum)
    # P0_FULL is reused to signal that both sums are stored: no wait for P of block 0 is outstanding.
    barriers.wait(P0_FULL, barriers.PAIR_THREADS)
    return ConsumerState(state.out, state.row_max, state.row_sum + other.load(SCORE_ROWS))
