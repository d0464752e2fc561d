"""Scores of a block of keys, and which of them a query row may see."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from flashlatte.ops.dense_decode.hopper.tiles import COPY, KEYS, ROWS, SCORE_COLS, SCORE_ROWS
from flashlatte.runtime.gluon_compat import cta_barrier


class Sight(NamedTuple):
    """Which keys the rows of a request see.

    Attributes:
        length: keys of the request.
        clean: keys that every row of the tile sees, if their pages are in the cache.
        seen: [64], keys that each row sees.
    """

    length: Any
    clean: Any
    seen: Any


@gluon.jit
def sight(length, hidden, heads, first_row):
    """``hidden``: keys at the end that the first query token does not see (s_q - 1 if causal, else 0)."""
    token = (first_row + gl.arange(0, ROWS, SCORE_ROWS)) // heads
    return Sight(length, length - hidden, gl.minimum(length - hidden + token, length))


@gluon.jit
def hide(scores, sight, page, first_key, left, right):
    """Scores [64, 64] of the block at ``first_key``, -inf where a row does not see the key.

    What lies in the cache beyond a request's end may be NaN, which a weight of zero would not hide: it is zeroed.
    """
    if (first_key + KEYS > sight.clean) | (page < 0):
        key = first_key + gl.arange(0, KEYS, SCORE_COLS)
        seen = gl.where(page < 0, 0, sight.seen)
        scores = gl.where(key[None, :] < seen[:, None], scores, float("-inf"))
        if first_key + KEYS > sight.length:
            _zero_rows(left, sight.length - first_key)
            _zero_rows(right, sight.length - first_key)
            fence_async_shared()
            cta_barrier()
    return scores


@gluon.jit
def _zero_rows(tile, first):
    """Zero the rows of a tile [64, 256] from row ``first`` on."""
    row = gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    for col in gl.static_range(0, 256, 64):
        part = tile.slice(col, 64, dim=1)
        values = part.load(COPY)
        part.store(gl.where((row < first)[:, None], values, 0.0).to(values.dtype))


@gluon.jit
def score_left(q, k, k_ready, phase, scores):
    """Left half of queries · left half of keys, once those have come. ``scores``: registers for the result."""
    mbarrier.wait(k_ready, phase)
    return warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def score_right(q, q_rope, k, k_rope, k_ready, phase, scores):
    """``scores`` plus the same of the right half, and of the rope if ``q_rope`` is not None."""
    mbarrier.wait(k_ready, phase)
    scores = warpgroup_mma(q, k.permute((1, 0)), scores, is_async=True)
    if q_rope is not None:
        scores = warpgroup_mma(q_rope, k_rope.permute((1, 0)), scores, is_async=True)
    return scores
