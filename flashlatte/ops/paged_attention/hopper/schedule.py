"""Which tile comes next: a list of all tiles, worked off in order by whichever program is free.

The list exists only as arithmetic. Its order, from the outside in: key heads (so that the keys and values of one or two
are in use at a time, and stay in L2), requests, blocks of queries from the last to the first (with a causal mask from
the longest to the shortest), packs of query heads of the key head. Requests of few queries are not in the list. The
tokens before the first request and behind the last one are listed as requests without keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import TILE
from flashlatte.ops.paged_attention.hopper.tiles import KEYS, Ticket

# Requests that the producer scans at a time, one a thread.
_SCAN = gl.constexpr(32)
_SCANNED = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


class Problem(NamedTuple):
    """The requests, and the tiles that have been taken.

    Attributes:
        cu_q: first token of each request and the end of the last one, [requests + 1].
        seqused_k, seqused_stride: keys of each request; at most ``capacity``.
        requests: how many.
        tokens: rows of q.
        fewest: queries of a request that has tiles.
        left, right: keys before and behind its own position that a query sees.
        packs, packs_each: of query heads, all and those of a key head.
        taken: int32 counter of tiles, 0 at launch, beyond the first of each program.
    """

    cu_q: Any
    seqused_k: Any
    seqused_stride: Any
    capacity: Any
    requests: Any
    tokens: Any
    fewest: Any
    left: Any
    right: Any
    packs: Any
    packs_each: Any
    taken: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _boundary(problem, index):
    return gl.minimum(gl.maximum(gl.load(problem.cu_q + index), 0), problem.tokens).to(gl.int32)


@gluon.jit
def _blocks(problem, item, PLAN: gl.constexpr):
    """Blocks of queries of each item: item 0 is what precedes the first request, item i + 1 request i."""
    TOKENS: gl.constexpr = TILE // PLAN.pack
    begin = gl.load(problem.cu_q + item - 1, mask=(item > 0) & (item <= problem.requests + 1), other=0)
    end = gl.load(problem.cu_q + item, mask=item <= problem.requests, other=problem.tokens)
    begin = gl.minimum(gl.maximum(begin, 0), problem.tokens)
    end = gl.minimum(gl.maximum(end, 0), problem.tokens)
    queries = gl.maximum(end - begin, 0)
    is_request = (item > 0) & (item <= problem.requests)
    listed = (item <= problem.requests + 1) & ((queries >= problem.fewest) | (is_request == 0))
    return gl.where(listed, (queries + TOKENS - 1) // TOKENS, 0).to(gl.int32)


@gluon.jit
def count_blocks(problem, PLAN: gl.constexpr):
    """Blocks of queries of all items."""
    total = gl.to_tensor(0)
    for start in range(0, problem.requests + 2, _SCAN):
        total += gl.sum(_blocks(problem, start + gl.arange(0, _SCAN, _SCANNED), PLAN), 0)
    return total


@gluon.jit
def find(problem, tile, num_blocks, PLAN: gl.constexpr):
    """The ticket of a tile, and its request."""
    TOKENS: gl.constexpr = TILE // PLAN.pack
    of_key_head = num_blocks * problem.packs_each
    block = tile % of_key_head // problem.packs_each
    pack = tile // of_key_head * problem.packs_each + tile % problem.packs_each

    item = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for start in range(0, problem.requests + 2, _SCAN):
        items = start + gl.arange(0, _SCAN, _SCANNED)
        blocks = _blocks(problem, items, PLAN)
        ends = scanned + gl.associative_scan(blocks, 0, _add)
        is_before = (items <= problem.requests + 1) & (ends <= block)
        item += gl.sum(is_before.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(is_before, ends, 0), 0))
        scanned += gl.sum(blocks, 0)

    is_request = (item > 0) & (item <= problem.requests)
    first = gl.where(item > 0, _boundary(problem, gl.maximum(item - 1, 0)), 0)
    end = gl.where(item <= problem.requests, _boundary(problem, gl.minimum(item, problem.requests)), problem.tokens)
    request = gl.minimum(gl.maximum(item - 1, 0), gl.maximum(problem.requests - 1, 0))
    queries = gl.maximum(end - first, 0)
    used = gl.load(problem.seqused_k + request.to(gl.int64) * problem.seqused_stride)
    used = gl.minimum(gl.maximum(used, 0), problem.capacity).to(gl.int32)
    keys = gl.where(is_request, used, 0)

    own = ((queries + TOKENS - 1) // TOKENS - 1 - (block - before)) * TOKENS
    tokens = gl.minimum(queries - own, TOKENS)
    position = own + keys - queries
    seen_from = gl.maximum(position - problem.left, 0)
    seen_to = gl.minimum(position + tokens + problem.right, keys)
    sees_some = seen_to > seen_from
    # Some block must be taken for the empty result to be written: one that is masked as a whole.
    first_key = gl.where(sees_some, seen_from, 0)
    last = gl.where(sees_some, (seen_to - 1) // KEYS, 0)
    count = last - first_key // KEYS + 1
    return Ticket(count, last, pack, first + own, tokens, position, first_key, keys), request


@gluon.jit
def take(problem):
    """The number of the next tile that nobody has."""
    return gl.num_programs(0) + gl.atomic_add(problem.taken, 1)
