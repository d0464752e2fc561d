"""Queries on their way to shared memory: by TMA, or by cp.async where TMA cannot copy them."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from flashlatte.kernels.hopper.mla_tiles import COPY, HALF, LATENT, ROPE, ROWS
from flashlatte.runtime.gluon_compat import cp_async, tma_load


class Query(NamedTuple):
    """The queries, their strides in units of 8 numbers (16 bytes); ``heads`` rows a token, ``rows`` a kv head.

    ``query_half`` and ``query_rope`` are descriptors of q, of boxes of tokens and heads that make 64 rows; None where
    none do.
    """

    query_half: Any
    query_rope: Any
    q: Any
    q_stride_request: Any
    q_stride_token: Any
    q_stride_head: Any
    heads: Any
    rows: Any


class Corner(NamedTuple):
    """Token and head of the first of a program's 64 rows."""

    token: Any
    head: Any


@gluon.jit
def find_corner(query, group):
    """Found early, while lengths are on their way."""
    token = group.first_row // query.heads
    return Corner(token, group.kv_head * query.heads + group.first_row - token * query.heads)


@gluon.jit
def load(tiles, full, query, corner, request, work, HAS_ROPE: gl.constexpr):
    """Begin to load a query, without its rope."""
    if query.query_half is not None:
        mbarrier.expect(full, ROWS * (LATENT + (ROPE if HAS_ROPE else 0)) * 2)
        tma_load(query.query_half, [request, corner.token, corner.head, 0], full, tiles.q_left.index(0))
        tma_load(query.query_half, [request, corner.token, corner.head, HALF], full, tiles.q_right.index(0))
    else:
        _copy(tiles.q_left, query, request, work, 0, HALF)
        _copy(tiles.q_right, query, request, work, HALF, HALF)


@gluon.jit
def load_rope(tiles, full, query, corner, request, work, HAS_ROPE: gl.constexpr):
    """Begin to load the rest of a query, if there is any."""
    if HAS_ROPE:
        if query.query_half is not None:
            tma_load(query.query_rope, [request, corner.token, corner.head, LATENT], full, tiles.q_rope.index(0))
        else:
            _copy(tiles.q_rope, query, request, work, LATENT, ROPE)


@gluon.jit
def signal(full, query):
    """Signal a query when it has come, where TMA does not."""
    if query.query_half is None:
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full)


@gluon.jit
def _copy(tile, query, request, work, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    row = work.group.first_row + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    head = work.group.kv_head * query.heads + row % query.heads
    offset = (
        request.to(gl.int64) * query.q_stride_request
        + (row // query.heads).to(gl.int64) * query.q_stride_token
        + head.to(gl.int64) * query.q_stride_head
    )
    col = FIRST_COL + gl.arange(0, COLS, gl.SliceLayout(0, COPY))
    pointers = query.q + (offset * 8)[:, None] + col[None, :]
    cp_async(tile.index(0), pointers, mask=(row < query.rows)[:, None])
