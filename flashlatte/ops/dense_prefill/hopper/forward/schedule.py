"""The dynamic tile scheduler: programs fetch the tiles of an ordered list from a global counter.

The list is not stored; tiles are computed from their index. Its order, outermost first: groups of heads (so that their
keys and values stay in L2), requests, blocks of queries from the last to the first (with a causal mask, from the
longest to the shortest), heads of the group. Tokens before the first request and after the last one are listed as
requests without keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import TILE
from flashlatte.ops.dense_prefill.hopper.forward.tiles import DensePrefillTile

# Requests that the producer scans at a time, four per thread.
_SCAN = gl.constexpr(128)
_SCANNED = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))


class DensePrefillWork(NamedTuple):
    """The requests, and the tile counter.

    Attributes:
        cu_q, cu_k: first token of each request and the end of the last one, [requests + 1].
        requests: number of requests.
        tokens_q, tokens_k: rows of q and of k.
        left, right: keys before and after its own position that are visible to a query.
        heads: query heads.
        group: heads that are processed concurrently; divides ``heads``.
        group_kv: query heads per kv head.
        tile_counter: int32, 0 at launch; counts the tiles fetched after the first one of each program.
    """

    cu_q: Any
    cu_k: Any
    requests: Any
    tokens_q: Any
    tokens_k: Any
    left: Any
    right: Any
    heads: Any
    group: Any
    group_kv: Any
    tile_counter: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _boundary(cu, index, tokens):
    return gl.minimum(gl.maximum(gl.load(cu + index), 0), tokens).to(gl.int32)


@gluon.jit
def _query_blocks(work, item):
    """Blocks of queries of each item: item 0 is the tokens before the first request, item i + 1 is request i."""
    begin = gl.load(work.cu_q + item - 1, mask=(item > 0) & (item <= work.requests + 1), other=0)
    end = gl.load(work.cu_q + item, mask=item <= work.requests, other=work.tokens_q)
    begin = gl.minimum(gl.maximum(begin, 0), work.tokens_q)
    end = gl.minimum(gl.maximum(end, 0), work.tokens_q)
    blocks = (gl.maximum(end - begin, 0) + TILE - 1) // TILE
    return gl.where(item <= work.requests + 1, blocks, 0).to(gl.int32)


@gluon.jit
def count_blocks(work):
    """Total blocks of queries of all items."""
    total = gl.to_tensor(0)
    for start in range(0, work.requests + 2, _SCAN):
        total += gl.sum(_query_blocks(work, start + gl.arange(0, _SCAN, _SCANNED)), 0)
    return total


@gluon.jit
def find_tile(work, tile, num_blocks, KEYS: gl.constexpr):
    """The work tile of index ``tile``, with blocks of KEYS keys, and the first token of its keys."""
    in_group = num_blocks * work.group
    block = tile % in_group // work.group
    head = tile // in_group * work.group + tile % work.group

    item = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for start in range(0, work.requests + 2, _SCAN):
        items = start + gl.arange(0, _SCAN, _SCANNED)
        blocks = _query_blocks(work, items)
        ends = scanned + gl.associative_scan(blocks, 0, _add)
        is_before = (items <= work.requests + 1) & (ends <= block)
        item += gl.sum(is_before.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(is_before, ends, 0), 0))
        scanned += gl.sum(blocks, 0)

    is_request = (item > 0) & (item <= work.requests)
    first_q = gl.where(item > 0, _boundary(work.cu_q, gl.maximum(item - 1, 0), work.tokens_q), 0)
    end_q = gl.where(
        item <= work.requests,
        _boundary(work.cu_q, gl.minimum(item, work.requests), work.tokens_q),
        work.tokens_q,
    )
    request = gl.minimum(gl.maximum(item - 1, 0), gl.maximum(work.requests - 1, 0))
    first_k = _boundary(work.cu_k, request, work.tokens_k)
    end_k = _boundary(work.cu_k, gl.minimum(request + 1, work.requests), work.tokens_k)
    queries = gl.maximum(end_q - first_q, 0)
    keys = gl.where(is_request, gl.maximum(end_k - first_k, 0), 0)

    row = ((queries + TILE - 1) // TILE - 1 - (block - before)) * TILE
    rows = gl.minimum(queries - row, TILE)
    position = row + keys - queries
    visible_from = gl.maximum(position - work.left, 0)
    visible_to = gl.minimum(position + rows + work.right, keys)
    first = visible_from // KEYS
    count = gl.where(visible_to > visible_from, (visible_to + KEYS - 1) // KEYS - first, 0)
    # At least one block, fully masked, so that the empty result is written.
    count = gl.maximum(count, 1)
    last = gl.where(visible_to > visible_from, first + count - 1, 0)
    return DensePrefillTile(count, last, head, first_q + row, rows, position, keys), first_k


@gluon.jit
def fetch_next_tile(work):
    """Fetch the index of the next tile."""
    # Relaxed: programs exchange nothing else, and a fence would wait for all pending loads of the thread.
    return gl.num_programs(0) + gl.atomic_add(work.tile_counter, 1, sem="relaxed")
