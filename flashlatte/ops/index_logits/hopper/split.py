"""Which tiles of keys a program takes: lengths are read on the device, and all tiles divided evenly.

The tiles of all requests stand in one list that exists only as arithmetic: request by request, and where a request has
more queries than a tile, group by group of queries. A program takes a part of the list, segment by segment: tiles of
one group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.index_logits.hopper.tiles import KEYS

# Requests that are looked at together. Every warp looks at all of them, so that no sum crosses warps.
_SCAN = gl.constexpr(128)
_SCANNED = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


class Work(NamedTuple):
    """The requests.

    Attributes:
        lengths: keys of each request, [requests], or that each query sees, [requests, next_n].
        request_stride, token_stride: of the lengths; token_stride is 0 where there is one length a request.
        most_keys: keys that fit the block table and the logits.
        next_n: queries of a request.
        group: queries that a tile takes.
    """

    lengths: Any
    request_stride: Any
    token_stride: Any
    most_keys: Any
    requests: Any
    next_n: Any
    group: Any


class Segment(NamedTuple):
    """Tiles of keys from ``key`` on for the queries from ``token`` on of a request; ``left`` tiles are the program's
    from here on, with these. No tiles: the end.
    """

    request: Any
    token: Any
    key: Any
    tiles: Any
    left: Any


@gluon.jit
def _length(work, request, token):
    address = work.lengths + request.to(gl.int64) * work.request_stride + token * work.token_stride
    return gl.load(address, mask=request < work.requests, other=0)


@gluon.jit
def _tiles(work, request, length, PER_QUERY: gl.constexpr):
    """Tiles of keys of requests, 0 behind the last one. ``length`` is the first of each request."""
    keys = _keys(work, length)
    if PER_QUERY:
        for token in range(1, work.next_n):
            keys = gl.maximum(keys, _keys(work, _length(work, request, token)))
    return (keys + KEYS - 1) // KEYS


@gluon.jit
def _keys(work, length):
    """Both bounds ahead of the cast: of int64 lengths far below 0 it would leave any number."""
    return gl.minimum(gl.maximum(length, 0), work.most_keys).to(gl.int32)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def read_first_lengths(work):
    """Lengths of the first requests, which are on their way while other things are prepared."""
    return _length(work, gl.arange(0, _SCAN, _SCANNED), 0)


@gluon.jit
def first_segment(work, first_lengths, PER_QUERY: gl.constexpr):
    """Where the program's part of the list begins."""
    groups = (work.next_n + work.group - 1) // work.group
    total = gl.sum(_tiles(work, gl.arange(0, _SCAN, _SCANNED), first_lengths, PER_QUERY), 0)
    for start in range(_SCAN, work.requests, _SCAN):
        candidates = start + gl.arange(0, _SCAN, _SCANNED)
        total += gl.sum(_tiles(work, candidates, _length(work, candidates, 0), PER_QUERY), 0)
    total *= groups
    part = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = gl.minimum(gl.program_id(0) * part, total)

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
    left = gl.minimum(total - begin, part)
    group = (begin - before) // tiles
    skipped = (begin - before) % tiles
    return Segment(request, group * work.group, skipped * KEYS, gl.minimum(tiles - skipped, left), left)


@gluon.jit
def next_segment(work, segment, PER_QUERY: gl.constexpr):
    """What the program takes next: the next group of the request, or the next request that has keys."""
    left = segment.left - segment.tiles
    request = segment.request
    token = segment.token + work.group
    if token >= work.next_n:
        token = 0
        request += 1
    tiles = _tiles(work, request, _length(work, request, 0), PER_QUERY)
    while (tiles == 0) & (request < work.requests):
        request += 1
        tiles = _tiles(work, request, _length(work, request, 0), PER_QUERY)
    return Segment(request, token, 0, gl.minimum(tiles, left), left)
