"""Which keys a query row may see: those before the request's end, and if causal none behind its own token."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.mla_tiles import COPY, KEYS, ROWS, SCORE_COLS, SCORE_ROWS
from flashlatte.kernels.hopper.ptx.threads import lanes_below_zero
from flashlatte.runtime.gluon_compat import cta_barrier


class Mask(NamedTuple):
    """Which keys the rows of a request see.

    Attributes:
        length: keys of the request.
        seen_by_all: keys that every row of the tile sees, if their pages are in the cache.
        seen: [64], keys that each row sees.
    """

    length: Any
    seen_by_all: Any
    seen: Any


@gluon.jit
def mask_of(length, causal_offset, heads, first_row):
    """``causal_offset``: keys at the end that the first query token does not see (s_q - 1 if causal, else 0)."""
    token = (first_row + gl.arange(0, ROWS, SCORE_ROWS)) // heads
    return Mask(length, length - causal_offset, gl.minimum(length - causal_offset + token, length))


@gluon.jit
def apply_mask(scores, mask, page, first_key, left, right, PLAN: gl.constexpr):
    """Scores [64, 64] of the block at ``first_key``, -inf where a row does not see the key. ``page``: its page or, of
    each box, pages, as ``schedule.page_of`` has them.

    What lies in the cache beyond a request's end may be NaN, which P of zero would not hide: it is zeroed.
    """
    BOX: gl.constexpr = PLAN.box
    absent = page < 0
    if BOX < KEYS:
        absent_boxes = lanes_below_zero(page)
        absent = absent_boxes != 0
    if (first_key + KEYS > mask.seen_by_all) | absent:
        key = first_key + gl.arange(0, KEYS, SCORE_COLS)
        seen = mask.seen
        if BOX < KEYS:
            box = gl.arange(0, KEYS, SCORE_COLS) // BOX
            key = gl.where((absent_boxes >> box) & 1 == 0, key, 2**31 - 1)
        else:
            seen = gl.where(absent, 0, seen)
        scores = gl.where(key[None, :] < seen[:, None], scores, float("-inf"))
        # What is cast is zero there.
        if not PLAN.one_byte:  # noqa: SIM102
            if first_key + KEYS > mask.length:
                _zero_rows(left, mask.length - first_key)
                _zero_rows(right, mask.length - first_key)
                fence_async_shared()
                cta_barrier()
    return scores


@gluon.jit
def _zero_rows(tile, first):
    """Zero the rows of a tile [64, 256] from row ``first`` on."""
    row = gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    for col in gl.static_range(0, 256, 64):
        part = tile.slice(col, 64, dim=1)  # [64, 64]
        values = part.load(COPY)
        part.store(gl.where((row < first)[:, None], values, 0.0).to(values.dtype))
