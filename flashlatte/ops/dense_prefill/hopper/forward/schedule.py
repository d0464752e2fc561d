"""The dynamic tile scheduler: programs fetch the tiles of an ordered list from a global counter.

The list is not stored; tiles are computed from their index. Its order, outermost first: groups of heads (so that their
keys and values stay in L2), requests, blocks of queries from the last to the first (with a causal mask, from the
longest to the shortest), heads of the group. Tokens before the first request and after the last one are listed as
requests without keys.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import TILE
from flashlatte.kernels.triton.packed import Window
from flashlatte.ops.dense_prefill.hopper.forward.tiles import DensePrefillTile
from flashlatte.ops.dense_prefill.params import DensePrefillRequests
from flashlatte.runtime.kernel_records import ElementPointer, Int32

# Requests that the producer scans at a time, four per thread.
_SCAN = gl.constexpr(128)
_SCANNED = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))


class DensePrefillWork(NamedTuple):
    """The requests, and the tile counter.

    Attributes:
        heads: query heads.
        group: heads that are processed concurrently; divides ``heads``.
        group_kv: query heads per kv head.
        tile_counter: int32, 0 at launch; counts the tiles fetched after the first one of each program.
    """

    requests: DensePrefillRequests
    window: Window
    heads: Int32
    group: Int32
    group_kv: Int32
    tile_counter: ElementPointer


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _boundary(cu, index, tokens):
    return gl.minimum(gl.maximum(gl.load(cu + index), 0), tokens).to(gl.int32)


@gluon.jit
def _query_blocks(requests, item):
    """Blocks of queries of each item: item 0 is the tokens before the first request, item i + 1 is request i."""
    begin = gl.load(requests.cu_seqlens_q + item - 1, mask=(item > 0) & (item <= requests.count + 1), other=0)
    end = gl.load(requests.cu_seqlens_q + item, mask=item <= requests.count, other=requests.total_q)
    begin = gl.minimum(gl.maximum(begin, 0), requests.total_q)
    end = gl.minimum(gl.maximum(end, 0), requests.total_q)
    blocks = (gl.maximum(end - begin, 0) + TILE - 1) // TILE
    return gl.where(item <= requests.count + 1, blocks, 0).to(gl.int32)


@gluon.jit
def count_blocks(work):
    """Total blocks of queries of all items."""
    total = gl.to_tensor(0)
    for start in range(0, work.requests.count + 2, _SCAN):
        total += gl.sum(_query_blocks(work.requests, start + gl.arange(0, _SCAN, _SCANNED)), 0)
    return total


@gluon.jit
def find_tile(work, tile, num_blocks, KEYS: gl.constexpr):
    """The work tile of index ``tile``, with blocks of KEYS keys, and the token of its key 0."""
    requests = work.requests
    in_group = num_blocks * work.group
    block = tile % in_group // work.group
    head = tile // in_group * work.group + tile % work.group

    item = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for start in range(0, requests.count + 2, _SCAN):
        items = start + gl.arange(0, _SCAN, _SCANNED)
        blocks = _query_blocks(requests, items)
        ends = scanned + gl.associative_scan(blocks, 0, _add)
        is_before = (items <= requests.count + 1) & (ends <= block)
        item += gl.sum(is_before.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(is_before, ends, 0), 0))
        scanned += gl.sum(blocks, 0)

    is_request = (item > 0) & (item <= requests.count)
    first_q = gl.where(item > 0, _boundary(requests.cu_seqlens_q, gl.maximum(item - 1, 0), requests.total_q), 0)
    end_q = gl.where(
        item <= requests.count,
        _boundary(requests.cu_seqlens_q, gl.minimum(item, requests.count), requests.total_q),
        requests.total_q,
    )
    request = gl.minimum(gl.maximum(item - 1, 0), gl.maximum(requests.count - 1, 0))
    first_k = _boundary(requests.cu_seqlens_k, request, requests.total_k)
    end_k = _boundary(requests.cu_seqlens_k, gl.minimum(request + 1, requests.count), requests.total_k)
    queries = gl.maximum(end_q - first_q, 0)
    keys = gl.where(is_request, gl.maximum(end_k - first_k, 0), 0)
    # With a window, the first keys may be visible to no query. Blocks begin after them: their values may be NaN.
    unseen = gl.maximum(keys - queries - work.window.left, 0)
    first_k += unseen
    keys -= unseen

    row = ((queries + TILE - 1) // TILE - 1 - (block - before)) * TILE
    rows = gl.minimum(queries - row, TILE)
    position = row + keys - queries
    visible_from = gl.maximum(position - work.window.left, 0)
    visible_to = gl.minimum(position + rows + work.window.right, keys)
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
