"""The list of blocks of queries of a prefill call, computed from the boundaries of its requests.

An item is a contiguous range of tokens: item 0 is the tokens before the first request, item i + 1 is request i, and the
last item is the tokens after the last request. The blocks of an item are in the list from the last to the first.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class QueryItem(NamedTuple):
    """An item.

    Attributes:
        is_request: whether it is a request.
        request: index of the request; otherwise of any request.
        first, end: its first token, and the end (exclusive), which may be less.
        before: blocks of the list before the item's.
    """

    is_request: Any
    request: Any
    first: Any
    end: Any
    before: Any


@gluon.jit
def boundary(cu, index, total):
    """cu[index] clamped to 0 … ``total``."""
    return gl.minimum(gl.maximum(gl.load(cu + index), 0), total).to(gl.int32)


@gluon.jit
def _items(start, SCAN: gl.constexpr):
    """SCAN consecutive items, spread over the producer's warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([SCAN // 32], [32], [1], [0])
    return start + gl.arange(0, SCAN, LAYOUT)


@gluon.jit
def _blocks_of(requests, item, min_queries, TOKENS: gl.constexpr):
    begin = gl.load(requests.cu_seqlens_q + item - 1, mask=(item > 0) & (item <= requests.count + 1), other=0)
    end = gl.load(requests.cu_seqlens_q + item, mask=item <= requests.count, other=requests.total_q)
    begin = gl.minimum(gl.maximum(begin, 0), requests.total_q)
    end = gl.minimum(gl.maximum(end, 0), requests.total_q)
    queries = gl.maximum(end - begin, 0)
    is_listed = item <= requests.count + 1
    if min_queries is not None:
        is_request = (item > 0) & (item <= requests.count)
        is_listed = is_listed & ((queries >= min_queries) | (is_request == 0))
    return gl.where(is_listed, (queries + TOKENS - 1) // TOKENS, 0).to(gl.int32)


@gluon.jit
def count_blocks(requests, min_queries, TOKENS: gl.constexpr, SCAN: gl.constexpr):
    """The number of blocks of TOKENS queries of all items. ``min_queries``: minimum queries of a request with blocks,
    or None. SCAN: items that the warp scans at a time, a multiple of 32."""
    total = gl.to_tensor(0)
    for start in range(0, requests.count + 2, SCAN):
        total += gl.sum(_blocks_of(requests, _items(start, SCAN), min_queries, TOKENS), 0)
    return total


@gluon.jit
def find_item(requests, block, min_queries, TOKENS: gl.constexpr, SCAN: gl.constexpr):
    """The item of block number ``block`` of the list. Other arguments as for ``count_blocks``."""
    item = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for start in range(0, requests.count + 2, SCAN):
        items = _items(start, SCAN)
        blocks = _blocks_of(requests, items, min_queries, TOKENS)
        ends = scanned + tl.cumsum(blocks, 0)
        is_before = (items <= requests.count + 1) & (ends <= block)
        item += gl.sum(is_before.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(is_before, ends, 0), 0))
        scanned += gl.sum(blocks, 0)

    total = requests.total_q
    is_request = (item > 0) & (item <= requests.count)
    first = gl.where(item > 0, boundary(requests.cu_seqlens_q, gl.maximum(item - 1, 0), total), 0)
    last_boundary = boundary(requests.cu_seqlens_q, gl.minimum(item, requests.count), total)
    end = gl.where(item <= requests.count, last_boundary, total)
    request = gl.minimum(gl.maximum(item - 1, 0), gl.maximum(requests.count - 1, 0))
    return QueryItem(is_request, request, first, end, before)
