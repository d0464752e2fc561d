"""The tiles of queries and their numbers of keys, computed on the device, so that launches do not depend on lengths.

A tile is a work item of ``split_kv``: some tokens of a request, with all query heads of a key head.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.ragged_tiles import find_rows, find_segment, find_segment_of_row
from flashlatte.kernels.triton.rows import Window
from flashlatte.ops.paged_attention.reference import PagedAttentionRequests
from flashlatte.runtime.kernel_records import Int32, Int64, Pointer
from flashlatte.runtime.triton_kernel import kernel

# Integers stored per tile: the fields of ``QueryTile``; ``split_kv.outputs`` reads the first two.
TILE_NUMBERS = 8


class VisibleRanges(NamedTuple):
    """The keys that are visible to a query: those of its window, and of a range that its position is in.

    Attributes:
        prefix_ranges: first and last position of each range, [requests, num_prefix_ranges, 2]; or None.
    """

    window: Window
    prefix_ranges: Pointer
    num_prefix_ranges: Int32
    prefix_stride_request: Int64
    prefix_stride_range: Int64


class TileLengths(NamedTuple):
    """The number of keys of each tile, int32 [num_tiles], at most ``limit``."""

    lengths: Pointer
    num_tiles: Int32
    limit: Int32


class QueryTile(NamedTuple):
    """A tile of queries.

    Attributes:
        first_token, tokens: its queries, in q.
        own: index of the first of them in the request.
        context: keys of the request before its queries, below 0 if it has fewer keys than queries; query i has position
            context + i.
        request: its index.
        cached: keys of the request in its pages.
        first_key, stop_key: range of the keys that are visible to any of its queries; first_key is rounded down to a
            multiple of BLOCK_N.
    """

    first_token: Any
    tokens: Any
    own: Any
    context: Any
    request: Any
    cached: Any
    first_key: Any
    stop_key: Any


@triton.jit
def load_tile(tiles, tiles_stride, item):
    """The tile of a work item."""
    base = tiles + item * tiles_stride
    return QueryTile(
        tl.load(base),
        tl.load(base + 1),
        tl.load(base + 2),
        tl.load(base + 3),
        tl.load(base + 4),
        tl.load(base + 5),
        tl.load(base + 6),
        tl.load(base + 7),
    )


@triton.jit
def visible_range(position, stop, window):
    """First and last key below ``stop`` in the windows of queries at these positions, both from -1 to ``stop``."""
    position = position.to(tl.int64)
    lower = tl.minimum(tl.maximum(position - window.left, 0), stop)
    upper = tl.maximum(tl.minimum(position + window.right, stop - 1), -1)
    return lower.to(tl.int32), upper.to(tl.int32)


@triton.jit
def visible_to_all(tile, window):
    """The range [first, end) of keys that are in the windows of all queries of a tile."""
    first = tile.context + tile.own
    lower, _ = visible_range(first + tile.tokens - 1, tile.stop_key, window)
    _, upper = visible_range(first, tile.stop_key, window)
    return lower, upper + 1


@kernel
def find_tiles_kernel(
    requests: PagedAttentionRequests,
    visible: VisibleRanges,
    tiles,
    lengths,
    max_queries: tl.int32,
    TILES_EACH: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_NEW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program writes the tile of one slot, and its number of keys to ``lengths``.

    A slot without a tile has no tokens. Tiles of no request have no keys. With TILES_EACH each request has that many
    slots, and tiles if it has at most ``max_queries`` queries. With BY_TOKEN each token has a slot.
    """
    slot = tl.program_id(0)
    cu = requests.cu_seqlens_q
    total_q = requests.total_q
    if TILES_EACH > 0:
        segment = slot // TILES_EACH + 1
        tile = slot % TILES_EACH
        begin, rows = find_rows(segment, cu, requests.count, total_q)
        count = tl.where(rows <= max_queries, tl.cdiv(rows, BLOCK_TOKENS), 0)
    elif BY_TOKEN:
        segment, tile, count, begin, rows = find_segment_of_row(slot, cu, requests.count, total_q, BLOCK_TOKENS)
    else:
        segment, tile, count, begin, rows = find_segment(slot, cu, requests.count, total_q, BLOCK_TOKENS)
    is_request = (segment > 0) & (segment <= requests.count)
    request = tl.where(is_request, segment - 1, 0)
    own = tl.where((tile >= 0) & (tile < count), tile, 0) * BLOCK_TOKENS
    tokens = tl.where((tile >= 0) & (tile < count), tl.minimum(rows - own, BLOCK_TOKENS), 0)

    cached = tl.load(requests.seqused_k + request * requests.seqused_stride, mask=is_request, other=0).to(tl.int64)
    cached = tl.minimum(tl.maximum(cached, 0), requests.capacity.to(tl.int64)).to(tl.int32)
    keys = cached + rows if HAS_NEW else cached
    context = keys - rows
    first_key, _ = visible_range(context + own, keys, visible.window)
    _, last_key = visible_range(context + own + tokens - 1, keys, visible.window)
    if visible.prefix_ranges is not None:
        of_request = visible.prefix_ranges + request * visible.prefix_stride_request
        for number in range(0, visible.num_prefix_ranges):
            address = of_request + number * visible.prefix_stride_range
            first = tl.load(address, mask=is_request, other=0).to(tl.int64)
            last = tl.load(address + 1, mask=is_request, other=-1).to(tl.int64)
            if (first <= last) & (first < context + own + tokens) & (last >= context + own):
                first_key = tl.minimum(first_key, tl.maximum(first, 0)).to(tl.int32)
                last_key = tl.maximum(last_key, tl.minimum(last, keys - 1)).to(tl.int32)
    is_visible = is_request & (tokens > 0) & (first_key <= last_key)
    stop_key = tl.where(is_visible, last_key + 1, 0)
    first_key = tl.where(is_visible, first_key, 0)

    base = tiles + slot.to(tl.int64) * 8
    tl.store(base, begin + own)
    tl.store(base + 1, tokens)
    tl.store(base + 2, own)
    tl.store(base + 3, context)
    tl.store(base + 4, request)
    tl.store(base + 5, cached)
    tl.store(base + 6, first_key)
    tl.store(base + 7, stop_key)
    tl.store(lengths + slot, stop_key - first_key // BLOCK_N * BLOCK_N)
