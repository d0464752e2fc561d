"""Which tile comes next: a list of all tiles, worked off in order by whichever program is free.

The list exists only as arithmetic. Its order, from the outside in: groups of heads (so that their keys and values stay
in L2), requests, blocks of queries from the last to the first (with a causal mask from the longest to the shortest),
heads of the group. The tokens before the first request and behind the last one are listed as requests without keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import TILE
from flashlatte.ops.dense_prefill.hopper.forward.tiles import Ticket

# Requests that the producer scans at a time, four a thread.
_SCAN = gl.constexpr(128)
_SCANNED = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))


class Problem(NamedTuple):
    """The requests, and the tiles that have been taken.

    Attributes:
        cu_q, cu_k: first token of each request and the end of the last one, [requests + 1].
        requests: how many.
        tokens_q, tokens_k: rows of q and of k.
        left, right: keys before and behind its own position that a query sees.
        heads: of the query.
        group: heads that are worked on together; divides ``heads``.
        group_kv: query heads of a key head.
        taken: int32 counter of tiles, 0 at launch, beyond the first of each program.
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
    taken: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _boundary(cu, index, tokens):
    return gl.minimum(gl.maximum(gl.load(cu + index), 0), tokens).to(gl.int32)


@gluon.jit
def _query_blocks(problem, item):
    """Blocks of queries of each item: item 0 is what precedes the first request, item i + 1 request i."""
    begin = gl.load(problem.cu_q + item - 1, mask=(item > 0) & (item <= problem.requests + 1), other=0)
    end = gl.load(problem.cu_q + item, mask=item <= problem.requests, other=problem.tokens_q)
    begin = gl.minimum(gl.maximum(begin, 0), problem.tokens_q)
    end = gl.minimum(gl.maximum(end, 0), problem.tokens_q)
    blocks = (gl.maximum(end - begin, 0) + TILE - 1) // TILE
    return gl.where(item <= problem.requests + 1, blocks, 0).to(gl.int32)


@gluon.jit
def count_blocks(problem):
    """Blocks of queries of all items."""
    total = gl.to_tensor(0)
    for start in range(0, problem.requests + 2, _SCAN):
        total += gl.sum(_query_blocks(problem, start + gl.arange(0, _SCAN, _SCANNED)), 0)
    return total


@gluon.jit
def find(problem, tile, num_blocks, KEYS: gl.constexpr):
    """The ticket of a tile, in blocks of KEYS keys, and the first token of its keys."""
    in_group = num_blocks * problem.group
    block = tile % in_group // problem.group
    head = tile // in_group * problem.group + tile % problem.group

    item = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for start in range(0, problem.requests + 2, _SCAN):
        items = start + gl.arange(0, _SCAN, _SCANNED)
        blocks = _query_blocks(problem, items)
        ends = scanned + gl.associative_scan(blocks, 0, _add)
        is_before = (items <= problem.requests + 1) & (ends <= block)
        item += gl.sum(is_before.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(is_before, ends, 0), 0))
        scanned += gl.sum(blocks, 0)

    is_request = (item > 0) & (item <= problem.requests)
    first_q = gl.where(item > 0, _boundary(problem.cu_q, gl.maximum(item - 1, 0), problem.tokens_q), 0)
    end_q = gl.where(
        item <= problem.requests,
        _boundary(problem.cu_q, gl.minimum(item, problem.requests), problem.tokens_q),
        problem.tokens_q,
    )
    request = gl.minimum(gl.maximum(item - 1, 0), gl.maximum(problem.requests - 1, 0))
    first_k = _boundary(problem.cu_k, request, problem.tokens_k)
    end_k = _boundary(problem.cu_k, gl.minimum(request + 1, problem.requests), problem.tokens_k)
    queries = gl.maximum(end_q - first_q, 0)
    keys = gl.where(is_request, gl.maximum(end_k - first_k, 0), 0)

    row = ((queries + TILE - 1) // TILE - 1 - (block - before)) * TILE
    rows = gl.minimum(queries - row, TILE)
    position = row + keys - queries
    seen_from = gl.maximum(position - problem.left, 0)
    seen_to = gl.minimum(position + rows + problem.right, keys)
    first = seen_from // KEYS
    count = gl.where(seen_to > seen_from, (seen_to + KEYS - 1) // KEYS - first, 0)
    # Some block must be taken for the empty result to be written: one that is masked as a whole.
    count = gl.maximum(count, 1)
    last = gl.where(seen_to > seen_from, first + count - 1, 0)
    return Ticket(count, last, head, first_q + row, rows, position, keys), first_k


@gluon.jit
def take(problem):
    """The number of the next tile that nobody has."""
    # Relaxed: nothing else passes between programs, and a fence waits for all that a thread has asked for.
    return gl.num_programs(0) + gl.atomic_add(problem.taken, 1, sem="relaxed")
