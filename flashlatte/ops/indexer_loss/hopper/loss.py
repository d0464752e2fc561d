"""The first two passes of the index kernel: index logits, and the divergence of their softmax from the target.

The arithmetic is that of ``portable/loss_kernels.py``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS, SCORE_ROWS
from flashlatte.kernels.triton.online_softmax import LN_2, LOG2_E
from flashlatte.ops.indexer_loss.hopper.head_sums import KEY_OF_SUM, add_sums, store_sums
from flashlatte.ops.indexer_loss.hopper.index_tiles import (
    is_valid,
    load_indices,
    load_weights,
    next_keys,
    scores_of,
)
from flashlatte.runtime.gluon_compat import cta_barrier

# Slots of a step of the softmax.
_BLOCK = gl.constexpr(512)
_SLOTS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
# Below it log t is that of this value, so that t = 0 contributes 0.
_SMALLEST_TARGET = gl.constexpr(1e-10)


@gluon.jit
def write_logits(work, indexer, indices, tiles):
    """Write the token's index logits, -inf for invalid keys. ``indices``: result of ``start_keys``."""
    weight = load_weights(indexer, work.token, True, SCORE_ROWS)
    for step in range((work.count + KEYS - 1) // KEYS):
        indices = next_keys(work, step, indices, tiles)
        valid = is_valid(work, load_indices(work, step, KEY_OF_SUM))
        scores = scores_of(tiles, step, indexer.index_scale)
        if indexer.use_relu:
            # Written such that NaN propagates.
            scores = gl.where(scores < 0, 0.0, scores)
        store_sums(weight[:, None] * scores, tiles.sums.index(0))
        # The barrier also ensures that the products of all warps are complete: the next step may overwrite these keys.
        cta_barrier()
        slot = step * KEYS + gl.arange(0, KEYS, KEY_OF_SUM)
        logits = gl.where(valid, add_sums(tiles.sums.index(0)), float("-inf"))
        gl.store(work.logits + slot, logits, mask=slot < work.count)


@gluon.jit
def _load(pointer, start, count, OTHER: gl.constexpr):
    slot = start + gl.arange(0, _BLOCK, _SLOTS)
    return gl.load(pointer + slot, mask=slot < count, other=OTHER)


@gluon.jit
def write_loss(work, target, losses, sees_keys, WITH_GRADIENT: gl.constexpr):
    """Write the token's divergence to ``losses``, and whether it attends to any key to ``sees_keys``; returns the
    latter. WITH_GRADIENT: overwrite the token's logits with their gradients."""
    lane_max = gl.full([_BLOCK], float("-inf"), gl.float32, _SLOTS)
    lane_sum = gl.zeros([_BLOCK], gl.float32, _SLOTS)
    lane_target = gl.zeros([_BLOCK], gl.float32, _SLOTS)
    lane_sees = gl.zeros([_BLOCK], gl.int32, _SLOTS)
    for start in range(0, work.count, _BLOCK):
        logit = _load(work.logits, start, work.count, float("-inf"))
        lane_target += _load(target, start, work.count, 0.0)
        lane_sees |= (logit != float("-inf")).to(gl.int32)
        new_max = gl.maximum(lane_max, logit)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        lane_sum = lane_sum * gl.exp2((lane_max - shift) * LOG2_E) + gl.exp2((logit - shift) * LOG2_E)
        lane_max = new_max
    row_max = gl.max(lane_max, axis=0)
    sees = gl.max(lane_sees, axis=0)
    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = gl.sum(lane_sum * gl.exp2((lane_max - shift) * LOG2_E), axis=0)
    lse = shift + gl.log2(gl.where(row_sum == 0, 1.0, row_sum)) * LN_2
    total = gl.sum(lane_target, axis=0)
    # All probabilities of the token underflow: its loss and gradient are 0.
    no_target = total == 0
    total = gl.where(no_target, 1.0, total)

    divergence = gl.zeros([_BLOCK], gl.float32, _SLOTS)
    for start in range(0, work.count, _BLOCK):
        logit = _load(work.logits, start, work.count, float("-inf"))
        # A correctly rounded division, as in PyTorch: if a token has a single key, its target is 1 and its gradient 0.
        t = gl.div_rn(_load(target, start, work.count, 0.0), gl.zeros_like(logit) + total)
        # Invalid slots have logit -inf.
        log_p = gl.where(logit == float("-inf"), 0.0, logit - lse)
        divergence += t * (gl.log2(gl.maximum(t, _SMALLEST_TARGET)) * LN_2 - log_p)
        if WITH_GRADIENT:
            p = gl.where((logit == float("-inf")) | no_target, 0.0, gl.exp2(log_p * LOG2_E))
            slot = start + gl.arange(0, _BLOCK, _SLOTS)
            gl.store(work.logits + slot, p - t, mask=slot < work.count)
    gl.store(losses + work.token, gl.sum(divergence, axis=0))
    gl.store(sees_keys + work.token, sees.to(gl.int8))
    return sees != 0
