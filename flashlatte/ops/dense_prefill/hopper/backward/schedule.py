"""The schedule of the backward kernel: each program computes its keys and queries from cu_seqlens.

A program processes a block of keys of one request. The blocks of request r use the slots from ``cu_k[r] // KEYS + r``:
that leaves as many slots as request r has blocks, or one more, so no list of blocks is needed, and bisection finds the
request of a slot. Keys before the first request and after the last one are treated as requests without queries: their
gradients are zeros.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Keys of a program, and queries of a step.
KEYS = gl.constexpr(128)
QUERIES = gl.constexpr(64)


@gluon.jit
def _bound(cu, index, requests, total):
    """Begin of interval ``index`` of the tokens: interval 0 precedes the first request."""
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


class KeyBlock(NamedTuple):
    """A block of keys, and the queries to which some of its keys are visible.

    Query 0 is the request's first query with a visible key. Key n of the block is visible to query q if
    q + below <= n <= q + above; keys before ``below`` are visible to no query.
    """

    k_token: Any  # first token of the block
    keys: Any  # from the block's first key to the end of the request: may exceed the block
    q_token: Any  # of query 0
    queries: Any
    first_query: Any  # a multiple of QUERIES
    tiles: Any  # of queries
    below: Any
    above: Any
    q_slot: Any  # slot of the request's first tile of queries, computed like those of key blocks


@gluon.jit
def needs_mask(block, query):
    """Whether any (query, key) pair of the block and the tile of queries from ``query`` on is masked."""
    return (query + QUERIES - 1 + block.below > 0) | (query + block.above < KEYS - 1) | (block.keys < KEYS)


@gluon.jit
def semaphore_value(block, query):
    """The number of later blocks of keys that add to the tile of queries from ``query`` on."""
    return gl.minimum(query + QUERIES - 1 + block.above, block.keys - 1) // KEYS


@gluon.jit
def block_of(slot, requests, window, bisections):
    count = requests.count
    cu_q = requests.cu_seqlens_q
    cu_k = requests.cu_seqlens_k
    q_total = requests.total_q
    k_total = requests.total_k
    interval = _interval_of(slot, cu_k, count, k_total, bisections)
    k_begin = _bound(cu_k, interval, count, k_total)
    keys = gl.maximum(_bound(cu_k, interval + 1, count, k_total) - k_begin, 0)
    q_begin = _bound(cu_q, interval, count, q_total)
    queries = gl.maximum(_bound(cu_q, interval + 1, count, q_total) - q_begin, 0)
    queries = gl.where((interval == 0) | (interval == count + 1), 0, queries)
    first_key = (slot - (k_begin // KEYS + interval)) * KEYS

    extent = keys + queries
    right = gl.minimum(gl.maximum(window.right, -extent), extent)
    # The first queries of a request with fewer keys may have no visible key. Tiles begin after them: they may be NaN.
    without_keys = gl.maximum(queries - keys - right, 0)
    q_begin += without_keys
    queries -= without_keys
    offset = keys - queries
    above = offset + right - first_key
    below = offset - gl.minimum(gl.maximum(window.left, -extent), extent) - first_key
    begin = gl.maximum(-above, 0) // QUERIES * QUERIES
    end = gl.minimum(KEYS - below, queries)
    tiles = gl.where(first_key < keys, gl.maximum(end - begin + QUERIES - 1, 0) // QUERIES, 0)
    q_slot = q_begin // QUERIES + interval
    return KeyBlock(k_begin + first_key, keys - first_key, q_begin, queries, begin, tiles, below, above, q_slot)
