"""The dynamic tile scheduler: programs fetch the tiles of an ordered list from a global counter.

The list is not stored; tiles are computed from their index. Its order, outermost first: kv heads (so that the keys and
values of one or two heads are in use at a time and stay in L2), requests, blocks of queries from the last to the first
(with a causal mask, from the longest to the shortest), packs of query heads of the kv head. Requests with few queries
are not in the list. Tokens before the first request and after the last one are listed as requests without keys.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import TILE
from flashlatte.kernels.triton.packed import Window
from flashlatte.ops.paged_attention.hopper.tiles import KEYS, PagedPrefillTile
from flashlatte.ops.paged_attention.requests import PagedAttentionRequests
from flashlatte.runtime.kernel_records import ElementPointer, Int32

# Requests that the producer scans at a time, one per thread.
_SCAN = gl.constexpr(32)
_SCANNED = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


class PagedPrefillWork(NamedTuple):
    """The requests, and the tile counter.

    Attributes:
        min_queries: minimum queries of a request with tiles.
        packs, packs_per_kv_head: packs of query heads, in total and per kv head.
        tile_counter: int32, 0 at launch; counts the tiles fetched after the first one of each program.
    """

    requests: PagedAttentionRequests
    window: Window
    min_queries: Int32
    packs: Int32
    packs_per_kv_head: Int32
    tile_counter: ElementPointer


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _boundary(requests, index):
    return gl.minimum(gl.maximum(gl.load(requests.cu_seqlens_q + index), 0), requests.total_q).to(gl.int32)


@gluon.jit
def _blocks(work, item, CONFIG: gl.constexpr):
    """Blocks of queries of each item: item 0 is the tokens before the first request, item i + 1 is request i."""
    TOKENS: gl.constexpr = TILE // CONFIG.pack
    requests = work.requests
    begin = gl.load(requests.cu_seqlens_q + item - 1, mask=(item > 0) & (item <= requests.count + 1), other=0)
    end = gl.load(requests.cu_seqlens_q + item, mask=item <= requests.count, other=requests.total_q)
    begin = gl.minimum(gl.maximum(begin, 0), requests.total_q)
    end = gl.minimum(gl.maximum(end, 0), requests.total_q)
    queries = gl.maximum(end - begin, 0)
    is_request = (item > 0) & (item <= requests.count)
    listed = (item <= requests.count + 1) & ((queries >= work.min_queries) | (is_request == 0))
    return gl.where(listed, (queries + TOKENS - 1) // TOKENS, 0).to(gl.int32)


@gluon.jit
def count_blocks(work, CONFIG: gl.constexpr):
    """Total blocks of queries of all items."""
    total = gl.to_tensor(0)
    for start in range(0, work.requests.count + 2, _SCAN):
        total += gl.sum(_blocks(work, start + gl.arange(0, _SCAN, _SCANNED), CONFIG), 0)
    return total


@gluon.jit
def find_tile(work, tile, num_blocks, CONFIG: gl.constexpr):
    """The work tile of index ``tile``, and its request."""
    TOKENS: gl.constexpr = TILE // CONFIG.pack
    requests = work.requests
    of_key_head = num_blocks * work.packs_per_kv_head
    block = tile % of_key_head // work.packs_per_kv_head
    pack = tile // of_key_head * work.packs_per_kv_head + tile % work.packs_per_kv_head

    item = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for start in range(0, requests.count + 2, _SCAN):
        items = start + gl.arange(0, _SCAN, _SCANNED)
        blocks = _blocks(work, items, CONFIG)
        ends = scanned + gl.associative_scan(blocks, 0, _add)
        is_before = (items <= requests.count + 1) & (ends <= block)
        item += gl.sum(is_before.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(is_before, ends, 0), 0))
        scanned += gl.sum(blocks, 0)

    is_request = (item > 0) & (item <= requests.count)
    first = gl.where(item > 0, _boundary(requests, gl.maximum(item - 1, 0)), 0)
    end = gl.where(item <= requests.count, _boundary(requests, gl.minimum(item, requests.count)), requests.total_q)
    request = gl.minimum(gl.maximum(item - 1, 0), gl.maximum(requests.count - 1, 0))
    queries = gl.maximum(end - first, 0)
    used = gl.load(requests.seqused_k + request.to(gl.int64) * requests.seqused_stride)
    used = gl.minimum(gl.maximum(used, 0), requests.capacity).to(gl.int32)
    keys = gl.where(is_request, used, 0)

    own = ((queries + TOKENS - 1) // TOKENS - 1 - (block - before)) * TOKENS
    tokens = gl.minimum(queries - own, TOKENS)
    position = own + keys - queries
    visible_from = gl.maximum(position - work.window.left, 0)
    visible_to = gl.minimum(position + tokens + work.window.right, keys)
    sees_some = visible_to > visible_from
    # At least one block, fully masked, so that the empty result is written.
    first_key = gl.where(sees_some, visible_from, 0)
    last = gl.where(sees_some, (visible_to - 1) // KEYS, 0)
    count = last - first_key // KEYS + 1
    return PagedPrefillTile(count, last, pack, first + own, tokens, position, first_key, keys), request


@gluon.jit
def fetch_next_tile(work):
    """Fetch the index of the next tile."""
    return gl.num_programs(0) + gl.atomic_add(work.tile_counter, 1)
