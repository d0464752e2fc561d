"""The first two passes of the index kernel: index logits, and the divergence of their softmax from the target."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS, SCORE_ROWS
from flashlatte.ops.indexer_loss.divergence import add_logits, divergence_terms, lse_of_lanes
from flashlatte.ops.indexer_loss.hopper.head_sums import KEY_OF_SUM, add_sums, store_sums
from flashlatte.ops.indexer_loss.hopper.index_tiles import is_valid, load_indices, load_weights, next_keys, scores_of
from flashlatte.runtime.gluon_compat import cta_barrier

# Slots of a step of the softmax.
_BLOCK = gl.constexpr(512)
_SLOTS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


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
        lane_max, lane_sum = add_logits(lane_max, lane_sum, logit)
    sees = gl.max(lane_sees, axis=0)
    lse = lse_of_lanes(lane_max, lane_sum)
    total = gl.sum(lane_target, axis=0)
    has_target = total != 0
    total = gl.where(has_target, total, 1.0)

    divergence = gl.zeros([_BLOCK], gl.float32, _SLOTS)
    for start in range(0, work.count, _BLOCK):
        logit = _load(work.logits, start, work.count, float("-inf"))
        # A correctly rounded division, as in PyTorch: if a token has a single key, its target is 1 and its gradient 0.
        t = gl.div_rn(_load(target, start, work.count, 0.0), gl.zeros_like(logit) + total)
        terms, gradient = divergence_terms(logit, t, lse, has_target)
        divergence += terms
        if WITH_GRADIENT:
            slot = start + gl.arange(0, _BLOCK, _SLOTS)
            gl.store(work.logits + slot, gradient, mask=slot < work.count)
    gl.store(losses + work.token, gl.sum(divergence, axis=0))
    gl.store(sees_keys + work.token, sees.to(gl.int8))
    return sees != 0
