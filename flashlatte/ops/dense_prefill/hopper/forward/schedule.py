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

from flashlatte.kernels.hopper import prefill_schedule
from flashlatte.kernels.hopper.prefill_schedule import boundary
from flashlatte.kernels.hopper.two_consumers import TILE
from flashlatte.kernels.triton.rows import Window
from flashlatte.ops.dense_prefill.hopper.forward.tiles import DensePrefillTile
from flashlatte.ops.dense_prefill.reference import DensePrefillRequests
from flashlatte.runtime.kernel_records import ElementPointer, Int32

# Items that the producer scans at a time, four per thread.
_SCAN = gl.constexpr(128)


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
def count_blocks(work):
    """Total blocks of queries of all items."""
    return prefill_schedule.count_blocks(work.requests, None, TILE, _SCAN)


@gluon.jit
def find_tile(work, tile, num_blocks, KEYS: gl.constexpr):
    """The work tile of index ``tile``, with blocks of KEYS keys, and the token of its key 0."""
    requests = work.requests
    in_group = num_blocks * work.group
    block = tile % in_group // work.group
    head = tile // in_group * work.group + tile % work.group
    item = prefill_schedule.find_item(requests, block, None, TILE, _SCAN)
    first_k = boundary(requests.cu_seqlens_k, item.request, requests.total_k)
    end_k = boundary(requests.cu_seqlens_k, gl.minimum(item.request + 1, requests.count), requests.total_k)
    queries = gl.maximum(item.end - item.first, 0)
    keys = gl.where(item.is_request, gl.maximum(end_k - first_k, 0), 0)
    # With a window, the first keys may be visible to no query. Blocks begin after them: their values may be NaN.
    unseen = gl.maximum(keys - queries - work.window.left, 0)
    first_k += unseen
    keys -= unseen

    row = ((queries + TILE - 1) // TILE - 1 - (block - item.before)) * TILE
    rows = gl.minimum(queries - row, TILE)
    position = row + keys - queries
    visible_from = gl.maximum(position - work.window.left, 0)
    visible_to = gl.minimum(position + rows + work.window.right, keys)
    first = visible_from // KEYS
    count = gl.where(visible_to > visible_from, (visible_to + KEYS - 1) // KEYS - first, 0)
    # At least one block, fully masked, so that the empty result is written.
    count = gl.maximum(count, 1)
    last = gl.where(visible_to > visible_from, first + count - 1, 0)
    return DensePrefillTile(count, last, head, item.first + row, rows, position, keys), first_k


@gluon.jit
def fetch_next_tile(work):
    """Fetch the index of the next tile."""
    # Relaxed: programs exchange nothing else, and a fence would wait for all pending loads of the thread.
    return gl.num_programs(0) + gl.atomic_add(work.tile_counter, 1, sem="relaxed")
