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

from flashlatte.kernels.hopper import prefill_schedule
from flashlatte.kernels.hopper.two_consumers import TILE
from flashlatte.kernels.triton.rows import Window
from flashlatte.ops.paged_attention.hopper.tiles import KEYS, PagedPrefillTile
from flashlatte.ops.paged_attention.reference import PagedAttentionRequests
from flashlatte.runtime.kernel_records import ElementPointer, Int32

# Items that the producer scans at a time, one per thread.
_SCAN = gl.constexpr(32)


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
def count_blocks(work, CONFIG: gl.constexpr):
    """Total blocks of queries of all items."""
    return prefill_schedule.count_blocks(work.requests, work.min_queries, TILE // CONFIG.pack, _SCAN)


@gluon.jit
def find_tile(work, tile, num_blocks, CONFIG: gl.constexpr):
    """The work tile of index ``tile``, and its request."""
    TOKENS: gl.constexpr = TILE // CONFIG.pack
    requests = work.requests
    of_key_head = num_blocks * work.packs_per_kv_head
    block = tile % of_key_head // work.packs_per_kv_head
    pack = tile // of_key_head * work.packs_per_kv_head + tile % work.packs_per_kv_head
    item = prefill_schedule.find_item(requests, block, work.min_queries, TOKENS, _SCAN)
    queries = gl.maximum(item.end - item.first, 0)
    used = gl.load(requests.seqused_k + item.request.to(gl.int64) * requests.seqused_stride)
    used = gl.minimum(gl.maximum(used, 0), requests.capacity).to(gl.int32)
    keys = gl.where(item.is_request, used, 0)

    row = ((queries + TOKENS - 1) // TOKENS - 1 - (block - item.before)) * TOKENS
    tokens = gl.minimum(queries - row, TOKENS)
    position = row + keys - queries
    visible_from = gl.maximum(position - work.window.left, 0)
    visible_to = gl.minimum(position + tokens + work.window.right, keys)
    is_visible = visible_to > visible_from
    # At least one block, fully masked, so that the empty result is written.
    first_key = gl.where(is_visible, visible_from, 0)
    last = gl.where(is_visible, (visible_to - 1) // KEYS, 0)
    count = last - first_key // KEYS + 1
    return PagedPrefillTile(count, last, pack, item.first + row, tokens, position, first_key, keys), item.request


@gluon.jit
def fetch_next_tile(work):
    """Fetch the index of the next tile."""
    return gl.num_programs(0) + gl.atomic_add(work.tile_counter, 1)
