"""A consumer's share of the softmax: which keys a row sees, and P."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.ptx.registers import mask_columns
from flashlatte.kernels.hopper.softmax import HEADROOM, NO_SCORE
from flashlatte.ops.dense_prefill.hopper.forward.tiles import CHUNK, COPY, ROWS, accumulator
from flashlatte.runtime.gluon_compat import cta_barrier


class Mask(NamedTuple):
    """Which keys the rows of a consumer see.

    Attributes:
        seen_by_all_from, seen_by_all_to: the keys that all rows see.
        position: of the first row.
        keys: of the request.
        left, right: the window.
    """

    seen_by_all_from: Any
    seen_by_all_to: Any
    position: Any
    keys: Any
    left: Any
    right: Any


class State(NamedTuple):
    """Statistics of the rows, [64]: the raw score whose P is 1, and the sum of P."""

    row_max: Any
    row_sum: Any


@gluon.jit
def mask_of(ticket, window, FIRST_ROW: gl.constexpr):
    position = ticket.position + FIRST_ROW
    seen_by_all_from = position + ROWS - 1 - window.left
    seen_by_all_to = gl.minimum(position + window.right + 1, ticket.keys)
    return Mask(seen_by_all_from, seen_by_all_to, position, ticket.keys, window.left, window.right)


@gluon.jit
def apply_mask(scores, mask, first_key):
    """Scores [64, keys] of the block at ``first_key``, -inf where a row does not see the key."""
    KEYS: gl.constexpr = scores.shape[1]
    if (first_key < mask.seen_by_all_from) | (first_key + KEYS > mask.seen_by_all_to):
        position = mask.position - first_key + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(KEYS)))
        seen_from = position - mask.left
        seen_to = gl.minimum(position + mask.right + 1, mask.keys - first_key)
        key = gl.arange(0, KEYS, gl.SliceLayout(0, accumulator(KEYS)))[None, :]
        scores = mask_columns(scores, seen_from[:, None] - key, seen_to[:, None] - key)
    return scores


@gluon.jit
def _zero(tile, first):
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, COPY))
    values = tile.load(COPY)
    tile.store(gl.where((row < first)[:, None], values, 0.0).to(values.dtype))


@gluon.jit
def zero_values(tiles, stage, first):
    """Zero the values [keys, d_v] of a stage from row ``first`` on.

    They belong to another request or to none, and may be NaN, which P of zero would not hide. Both consumers do
    so, each before its own product: what they write is the same.
    """
    tile = tiles[0].index(stage)
    COLUMNS: gl.constexpr = tile.shape[1]
    for col in gl.static_range(0, COLUMNS, CHUNK):
        _zero(tile.slice(col, CHUNK, dim=1), first)
    if len(tiles) == 2:
        _zero(tiles[1].index(stage), first)
    fence_async_shared()
    cta_barrier()


@gluon.jit
def empty_state(KEYS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator(KEYS))
    return State(gl.full([ROWS], NO_SCORE, gl.float32, LAYOUT), gl.zeros([ROWS], gl.float32, LAYOUT))


@gluon.jit
def attend(state, scores, scale_log2):
    """P of a block [64, keys], the statistics with it, and alpha [64], by which what was summed before is rescaled."""
    block_max = gl.max(scores, 1)
    row_max = gl.where((block_max - state.row_max) * scale_log2 > HEADROOM, block_max, state.row_max)
    p = gl.exp2(scores * scale_log2 - (row_max * scale_log2)[:, None])
    alpha = gl.exp2((state.row_max - row_max) * scale_log2)
    return p, State(row_max, state.row_sum * alpha + gl.sum(p, 1)), alpha
