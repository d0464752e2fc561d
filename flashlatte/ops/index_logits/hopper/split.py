"""The tile scheduler: each program reads the lengths on the device and takes an equal share of all tiles.

The tiles of all requests form a list that is not stored: request by request, and within a request with more queries
than a tile, group by group of queries. A program processes a contiguous share of the list in segments: tiles of one
group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.index_logits.hopper.tiles import KEYS

# Requests per step of the scan. Every warp scans all of them, so that no reduction crosses warps.
_SCAN = gl.constexpr(128)
_SCANNED = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


class PagedLogitsWork(NamedTuple):
    """The requests.

    Attributes:
        lengths: keys of each request, [requests], or visible keys of each query, [requests, next_n].
        request_stride, token_stride: strides of the lengths; token_stride is 0 with one length per request.
        max_keys: maximum keys, limited by the block table and the logits.
        next_n: queries per request.
        group: queries per tile.
    """

    lengths: Any
    request_stride: Any
    token_stride: Any
    max_keys: Any
    requests: Any
    next_n: Any
    group: Any


class Segment(NamedTuple):
    """``tiles`` tiles of keys from ``key`` on, for the queries from ``token`` on of a request. ``remaining``: tiles of
    the program from here on, including these. 0 tiles ends the loop.
    """

    request: Any
    token: Any
    key: Any
    tiles: Any
    remaining: Any


@gluon.jit
def _length(work, request, token):
    address = work.lengths + request.to(gl.int64) * work.request_stride + token * work.token_stride
    return gl.load(address, mask=request < work.requests, other=0)


@gluon.jit
def _tiles(work, request, length, PER_QUERY: gl.constexpr):
    """Tiles of keys of requests; 0 after the last request. ``length``: first length of each request."""
    keys = _keys(work, length)
    if PER_QUERY:
        for token in range(1, work.next_n):
            keys = gl.maximum(keys, _keys(work, _length(work, request, token)))
    return (keys + KEYS - 1) // KEYS


@gluon.jit
def _keys(work, length):
    """Clamp before the cast, which would truncate int64 lengths."""
    return gl.minimum(gl.maximum(length, 0), work.max_keys).to(gl.int32)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def read_first_lengths(work):
    """Start loading the lengths of the first requests, which overlaps with the setup."""
    return _length(work, gl.arange(0, _SCAN, _SCANNED), 0)


@gluon.jit
def first_segment(work, first_lengths, PER_QUERY: gl.constexpr):
    """The first segment of the program's share of the list."""
    groups = (work.next_n + work.group - 1) // work.group
    total = gl.sum(_tiles(work, gl.arange(0, _SCAN, _SCANNED), first_lengths, PER_QUERY), 0)
    for start in range(_SCAN, work.requests, _SCAN):
        candidates = start + gl.arange(0, _SCAN, _SCANNED)
        total += gl.sum(_tiles(work, candidates, _length(work, candidates, 0), PER_QUERY), 0)
    total *= groups
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = gl.minimum(gl.program_id(0) * share, total)

    request = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for start in range(0, work.requests, _SCAN):
        candidates = start + gl.arange(0, _SCAN, _SCANNED)
        tiles = _tiles(work, candidates, _length(work, candidates, 0), PER_QUERY) * groups
        ends = scanned + gl.associative_scan(tiles, 0, _add)
        passed = (candidates < work.requests) & (ends <= begin)
        request += gl.sum(passed.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
        scanned += gl.sum(tiles, 0)
    tiles = gl.maximum(_tiles(work, request, _length(work, request, 0), PER_QUERY), 1)
    remaining = gl.minimum(total - begin, share)
    group = (begin - before) // tiles
    skipped = (begin - before) % tiles
    return Segment(request, group * work.group, skipped * KEYS, gl.minimum(tiles - skipped, remaining), remaining)


@gluon.jit
def next_segment(work, segment, PER_QUERY: gl.constexpr):
    """The next segment: the next group of the request, or the next request with keys."""
    remaining = segment.remaining - segment.tiles
    request = segment.request
    token = segment.token + work.group
    if token >= work.next_n:
        token = 0
        request += 1
    tiles = _tiles(work, request, _length(work, request, 0), PER_QUERY)
    while (tiles == 0) & (request < work.requests):
        request += 1
        tiles = _tiles(work, request, _length(work, request, 0), PER_QUERY)
    return Segment(request, token, 0, gl.minimum(tiles, remaining), remaining)
