"""The tile scheduler: each program reads the lengths on the device and takes an equal share of all tiles.

The tiles of all requests form a list that is not stored: request by request, and within a request with more queries
than a tile, group by group of queries. A program processes a contiguous share of the list in segments: tiles of one
group. ``lengths`` is a ``QueryLengths``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.index_logits.hopper.tiles import KEYS

# Requests per step of the scan. Every warp scans all of them, so that no reduction crosses warps.
_SCAN = gl.constexpr(128)
_SCANNED = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


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
def _length(lengths, request, token):
    address = lengths.lengths + request.to(gl.int64) * lengths.request_stride + token * lengths.token_stride
    return gl.load(address, mask=request < lengths.requests, other=0)


@gluon.jit
def _tiles(lengths, request, length):
    """Tiles of keys of requests; 0 after the last request. ``length``: first length of each request."""
    keys = _keys(lengths, length)
    if lengths.per_query:
        for token in range(1, lengths.next_n):
            keys = gl.maximum(keys, _keys(lengths, _length(lengths, request, token)))
    return (keys + KEYS - 1) // KEYS


@gluon.jit
def _keys(lengths, length):
    """Clamp before the cast, which would truncate int64 lengths."""
    return gl.minimum(gl.maximum(length, 0), lengths.max_keys).to(gl.int32)


@gluon.jit
def read_first_lengths(lengths):
    """Start loading the lengths of the first requests, which overlaps with the setup."""
    return _length(lengths, gl.arange(0, _SCAN, _SCANNED), 0)


@gluon.jit
def first_segment(lengths, first_lengths):
    """The first segment of the program's share of the list."""
    groups = (lengths.next_n + lengths.group - 1) // lengths.group
    total = gl.sum(_tiles(lengths, gl.arange(0, _SCAN, _SCANNED), first_lengths), 0)
    for start in range(_SCAN, lengths.requests, _SCAN):
        candidates = start + gl.arange(0, _SCAN, _SCANNED)
        total += gl.sum(_tiles(lengths, candidates, _length(lengths, candidates, 0)), 0)
    total *= groups
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = gl.minimum(gl.program_id(0) * share, total)

    request = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for start in range(0, lengths.requests, _SCAN):
        candidates = start + gl.arange(0, _SCAN, _SCANNED)
        tiles = _tiles(lengths, candidates, _length(lengths, candidates, 0)) * groups
        ends = scanned + tl.cumsum(tiles, 0)
        passed = (candidates < lengths.requests) & (ends <= begin)
        request += gl.sum(passed.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
        scanned += gl.sum(tiles, 0)
    tiles = gl.maximum(_tiles(lengths, request, _length(lengths, request, 0)), 1)
    remaining = gl.minimum(total - begin, share)
    group = (begin - before) // tiles
    skipped = (begin - before) % tiles
    return Segment(request, group * lengths.group, skipped * KEYS, gl.minimum(tiles - skipped, remaining), remaining)


@gluon.jit
def next_segment(lengths, segment):
    """The next segment: the next group of the request, or the next request with keys."""
    remaining = segment.remaining - segment.tiles
    request = segment.request
    token = segment.token + lengths.group
    if token >= lengths.next_n:
        token = 0
        request += 1
    tiles = _tiles(lengths, request, _length(lengths, request, 0))
    while (tiles == 0) & (request < lengths.requests):
        request += 1
        tiles = _tiles(lengths, request, _length(lengths, request, 0))
    return Segment(request, token, 0, gl.minimum(tiles, remaining), remaining)
