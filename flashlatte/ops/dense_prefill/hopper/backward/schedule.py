"""Which keys and which queries a program works on, computed by the program itself from cu_seqlens.

A program owns a block of keys of one request. The blocks of request r take the slots from ``cu_k[r] // KEYS + r``:
request r + 1 begins at least as many slots later as r has blocks, and at most one more, so no list of blocks is needed,
and a slot's request is found by bisection. The keys before the first request and after the last are requests
without queries: their gradients are zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Keys of a program, queries of a step.
KEYS = gl.constexpr(128)
QUERIES = gl.constexpr(64)


@gluon.jit
def _bound(cu, index, requests, total):
    """Where interval ``index`` of the key tokens begins: interval 0 lies before the first request."""
    inner = gl.load(cu + gl.minimum(gl.maximum(index - 1, 0), requests))
    inner = gl.minimum(gl.maximum(inner, 0), total).to(gl.int32)
    return gl.where(index == 0, 0, gl.where(index > requests + 1, total, inner))


@gluon.jit
def _interval_of(slot, cu, requests, total, bisections):
    low = 0
    high = requests + 1
    for _ in range(bisections):
        middle = (low + high + 1) // 2
        reached = _bound(cu, middle, requests, total) // KEYS + middle <= slot
        low = gl.where(reached, middle, low)
        high = gl.where(reached, high, gl.maximum(middle - 1, low))
    return low


class Block(NamedTuple):
    """A block of keys, and the queries that see some of it.

    Key n of the block is seen by the queries q of the request (counted from its first) for which
    q + below <= n <= q + above.
    """

    k_token: Any  # first token of the block
    keys: Any  # from the block's first to the request's last: there may be more than the block's
    q_token: Any  # first token of the request
    queries: Any  # of the request
    first_query: Any  # a multiple of QUERIES
    tiles: Any  # of queries
    below: Any
    above: Any
    q_slot: Any  # of the request's first tile of queries, found as those of key blocks are


@gluon.jit
def needs_mask(block, query):
    """Whether some of the tile of queries from ``query`` on does not see all keys of the block."""
    return (query + QUERIES - 1 + block.below > 0) | (query + block.above < KEYS - 1) | (block.keys < KEYS)


@gluon.jit
def turn_of(block, query):
    """How many later blocks of keys add to the tile of queries from ``query`` on."""
    return gl.minimum(query + QUERIES - 1 + block.above, block.keys - 1) // KEYS


@gluon.jit
def block_of(slot, cu_q, cu_k, requests, q_total, k_total, window_left, window_right, bisections):
    interval = _interval_of(slot, cu_k, requests, k_total, bisections)
    k_begin = _bound(cu_k, interval, requests, k_total)
    keys = gl.maximum(_bound(cu_k, interval + 1, requests, k_total) - k_begin, 0)
    q_begin = _bound(cu_q, interval, requests, q_total)
    queries = gl.maximum(_bound(cu_q, interval + 1, requests, q_total) - q_begin, 0)
    queries = gl.where((interval == 0) | (interval == requests + 1), 0, queries)
    first_key = (slot - (k_begin // KEYS + interval)) * KEYS

    offset = keys - queries
    extent = keys + queries
    above = offset + gl.minimum(gl.maximum(window_right, -extent), extent) - first_key
    below = offset - gl.minimum(gl.maximum(window_left, -extent), extent) - first_key
    begin = gl.maximum(-above, 0) // QUERIES * QUERIES
    end = gl.minimum(KEYS - below, queries)
    tiles = gl.where(first_key < keys, gl.maximum(end - begin + QUERIES - 1, 0) // QUERIES, 0)
    q_slot = q_begin // QUERIES + interval
    return Block(k_begin + first_key, keys - first_key, q_begin, queries, begin, tiles, below, above, q_slot)
