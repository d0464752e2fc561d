"""The tile scheduler: each program reads the lengths on the device and takes an equal share of all tiles.

The tiles of all requests form a list that is not stored: request by request, and within a request with more queries
than a tile, group by group of queries. A program processes a contiguous share of the list in segments: tiles of one
group. ``lengths`` is a ``QueryLengths``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.ops.index_logits.hopper.tiles import KEYS

# Requests per step of the scan.
_SCAN = gl.constexpr(128)


@gluon.constexpr_function
def _in_each_warp(WARPS):
    """_SCAN requests replicated in each warp, so that no reduction crosses warps."""
    return gl.BlockedLayout([_SCAN.value // 32], [32], [WARPS], [0])


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
def quotient(a, b):
    """⌊a / b⌋ of non-negative int32: a signed division takes twice as many instructions."""
    return (gl.to_tensor(a).to(gl.uint32) // gl.to_tensor(b).to(gl.uint32)).to(gl.int32)


@gluon.jit
def _tiles(lengths, request, length):
    """Tiles of keys of requests; 0 after the last request. ``length``: first length of each request."""
    if lengths.per_query:
        for token in range(1, lengths.next_n):
            length = gl.maximum(length, _length(lengths, request, opaque(token)))
    # Clamp before the cast, which would truncate int64 lengths.
    keys = gl.minimum(gl.maximum(length, 0), lengths.max_keys).to(gl.int32)
    return quotient(keys + KEYS - 1, KEYS)


@gluon.jit
def _search(tiles, scanned, begin):
    """Search tile ``begin`` of the list among requests with ``tiles`` tiles, of which the first begins at ``scanned``.

    Returns the number of requests that end before it, their tiles, and the tiles of the request that contains it.
    """
    ends = scanned + tl.cumsum(tiles, 0)
    passed = ends <= begin
    found = (ends > begin) & (ends - tiles <= begin)
    return gl.sum(passed.to(gl.int32), 0), gl.sum(gl.where(passed, tiles, 0), 0), gl.sum(gl.where(found, tiles, 0), 0)


@gluon.jit
def _share(total):
    """The first tile of the program's share of ``total`` tiles, and the number of tiles."""
    share = quotient(total + gl.num_programs(0) - 1, gl.num_programs(0))
    begin = gl.minimum(gl.program_id(0) * share, total)
    return begin, gl.minimum(total - begin, share)


@gluon.jit
def first_segment(lengths):
    """The first segment of the program's share of the list."""
    requests = gl.arange(0, _SCAN, _in_each_warp(gl.num_warps()))
    groups = (lengths.next_n + lengths.group - 1) // lengths.group
    # Without loops, so that the compiler overlaps the parts of the computation.
    if lengths.requests <= _SCAN:
        first_tiles = _tiles(lengths, requests, _length(lengths, requests, 0)) * groups
        begin, remaining = _share(gl.sum(first_tiles, 0))
        request, before, tiles = _search(first_tiles, 0, begin)
    else:
        total = gl.to_tensor(0)
        for start in range(0, lengths.requests, _SCAN):
            candidates = start + requests
            total += gl.sum(_tiles(lengths, candidates, _length(lengths, candidates, 0)), 0) * groups
        begin, remaining = _share(total)
        request = gl.to_tensor(0)
        before = gl.to_tensor(0)
        tiles = gl.to_tensor(0)
        scanned = gl.to_tensor(0)
        for start in range(0, lengths.requests, _SCAN):
            candidates = start + requests
            candidate_tiles = _tiles(lengths, candidates, _length(lengths, candidates, 0)) * groups
            passed, passed_tiles, found_tiles = _search(candidate_tiles, scanned, begin)
            request += passed
            before += passed_tiles
            tiles += found_tiles
            scanned += gl.sum(candidate_tiles, 0)
    skipped = begin - before
    token = gl.to_tensor(0)
    if groups > 1:
        tiles = quotient(tiles, groups)
        group = quotient(skipped, gl.maximum(tiles, 1))
        token = group * lengths.group
        skipped -= group * tiles
    return Segment(request, token, skipped * KEYS, gl.minimum(tiles - skipped, remaining), remaining)


@gluon.jit
def next_segment(lengths, segment):
    """The next segment: the next group of the request, or the next request with keys."""
    remaining = segment.remaining - segment.tiles
    request = segment.request
    token = segment.token + lengths.group
    if token >= lengths.next_n:
        token = 0
        request += 1
    # After the last segment no length is read.
    request = gl.where(remaining > 0, request, lengths.requests)
    tiles = _tiles(lengths, request, _length(lengths, request, 0))
    while (tiles == 0) & (request < lengths.requests):
        request += 1
        tiles = _tiles(lengths, request, _length(lengths, request, 0))
    return Segment(request, token, 0, gl.minimum(tiles, remaining), remaining)
