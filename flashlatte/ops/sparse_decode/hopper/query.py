"""Bringing an item's queries into shared memory: the even consumer does, which has time when they are asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from flashlatte.ops.sparse_decode.hopper import layouts, schedule
from flashlatte.ops.sparse_decode.hopper.tiles import ROWS, SWIZZLED_WORDS
from flashlatte.runtime.gluon_compat import cp_async, reinterpret


class Query(NamedTuple):
    """The queries as words, their strides in units of 16 bytes."""

    q: Any
    stride_request: Any
    stride_token: Any
    stride_head: Any
    heads: Any


@gluon.jit
def _copy_columns(tile, rows, valid, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    LAYOUT: gl.constexpr = layouts.copy_layout(WIDTH, False)
    row_layout: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    target = reinterpret(tile.index(0), gl.int32, [ROWS, WIDTH], SWIZZLED_WORDS)
    rows = gl.convert_layout(rows, row_layout, assert_trivial=True)[:, None]
    valid = gl.convert_layout(valid, row_layout, assert_trivial=True)[:, None]
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    pointers, mask = gl.broadcast(rows + column[None, :], valid)
    cp_async(target, pointers, mask=mask)


@gluon.jit
def copy(query, item, tokens, group, tiles, ready, HAS_ROPE: gl.constexpr):
    """Ask for the queries of an item and a group of heads, 0 beyond the last head; ``ready`` completes with them."""
    # What follows from it would else be worked out before the main loop, and kept.
    head = schedule.kept(group * ROWS + gl.arange(0, ROWS, layouts.tokens_layout(False)))
    offset = (
        (item // tokens).to(gl.int64) * query.stride_request
        + (item % tokens).to(gl.int64) * query.stride_token
        + head.to(gl.int64) * query.stride_head
    )
    rows = query.q + offset * 4
    valid = head < query.heads
    _copy_columns(tiles.q_left, rows, valid, 0, 128)
    _copy_columns(tiles.q_right, rows, valid, 128, 128)
    if HAS_ROPE:
        _copy_columns(tiles.q_rope, rows, valid, 256, 32)
    async_copy.mbarrier_arrive(ready, increment_count=False)
