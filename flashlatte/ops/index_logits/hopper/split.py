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
        request_stride, token_stride: of the lengths; 0 where there is one length a request.
        length_columns: 1 or next_n.
        shortened: 1 if a query sees a key less than the query behind it (one length a request), else 0.
        most_keys: keys that fit the block table and the logits.
        next_n: queries of a request.
        group: queries that a tile takes.
    """

    lengths: Any
    request_stride: Any
    token_stride: Any
    length_columns: Any
    shortened: Any
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
def _tiles(work, request):
    """Tiles of keys of requests; 0 behind the last one."""
    keys = request * 0
    row = work.lengths + request.to(gl.int64) * work.request_stride
    for column in range(work.length_columns):
        length = gl.load(row + column * work.token_stride, mask=request < work.requests, other=0)
        keys = gl.maximum(keys, gl.minimum(length, work.most_keys).to(gl.int32))
    return (keys + KEYS - 1) // KEYS


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _segment(work, request, group, skipped, left):
    """The segment of a group of queries behind ``skipped`` tiles."""
    tiles = gl.minimum(_tiles(work, request) - skipped, left)
    return Segment(request, group * work.group, skipped * KEYS, tiles, left)


@gluon.jit
def first_segment(work):
    groups = (work.next_n + work.group - 1) // work.group
    total = gl.to_tensor(0)
    for start in range(0, work.requests, _SCAN):
        total += gl.sum(_tiles(work, start + gl.arange(0, _SCAN, _SCANNED)), 0)
    total *= groups
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = gl.minimum(gl.program_id(0) * share, total)
    left = gl.minimum(total - begin, share)

    request = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for start in range(0, work.requests, _SCAN):
        candidates = start + gl.arange(0, _SCAN, _SCANNED)
        tiles = _tiles(work, candidates) * groups
        ends = scanned + gl.associative_scan(tiles, 0, _add)
        passed = (candidates < work.requests) & (ends <= begin)
        request += gl.sum(passed.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
        scanned += gl.sum(tiles, 0)
    skipped = begin - before
    tiles = gl.maximum(_tiles(work, request), 1)
    return _segment(work, request, skipped // tiles, skipped % tiles, left)


@gluon.jit
def next_segment(work, segment):
    left = segment.left - segment.tiles
    request = segment.request
    token = segment.token + work.group
    if token >= work.next_n:
        token = 0
        request += 1
        # Requests without keys have no tiles.
        while (left > 0) & (request < work.requests) & (_tiles(work, request) <= 0):
            request += 1
    return _segment(work, request, token // work.group, 0, left)
