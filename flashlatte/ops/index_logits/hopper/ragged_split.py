"""Which tiles of keys a program of the ragged kernel takes: ranges are read on the device, tiles divided evenly.

Queries are taken in blocks, each of which goes over the tiles that at least one of its queries sees. The tiles of all
blocks stand in one list that exists only as arithmetic; a program takes a part of it, segment by segment: tiles of one
block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.index_logits.hopper.tiles import KEYS

# Queries and blocks that are looked at together.
_SCANNED_QUERIES = 1024
_MOST_SCANNED = 128


class Problem(NamedTuple):
    """The queries, the range of keys that each sees, the keys, and those of them that this launch is for."""

    key_start: Any
    start_stride: Any
    key_end: Any
    end_stride: Any
    num_queries: Any
    num_keys: Any
    first_key: Any
    last_key: Any


class Segment(NamedTuple):
    """Tiles of keys from ``key`` on for a block of queries; ``left`` tiles are the program's from here on, with these.

    No tiles: the end.
    """

    block: Any
    key: Any
    tiles: Any
    left: Any


@gluon.jit
def key_range(problem, query):
    """The first key that each query sees and the end, within the keys; an empty range for what is no query."""
    is_query = query < problem.num_queries
    row = query.to(gl.int64)
    start = gl.load(problem.key_start + row * problem.start_stride, mask=is_query, other=0)
    end = gl.load(problem.key_end + row * problem.end_stride, mask=is_query, other=0)
    start = gl.minimum(gl.maximum(start, 0), problem.num_keys).to(gl.int32)
    end = gl.minimum(gl.maximum(end, 0), problem.num_keys).to(gl.int32)
    return start, end


@gluon.jit
def of_launch(problem, start, end):
    """What this launch has of ranges of keys."""
    return gl.maximum(start, problem.first_key), gl.minimum(end, problem.last_key)


@gluon.jit
def _tiles(problem, start, end, AXIS: gl.constexpr):
    """The first tile that one of the queries along an axis sees, and how many there are up to the last."""
    start, end = of_launch(problem, start, end)
    first = gl.min(gl.where(start < end, start, problem.last_key), AXIS) // KEYS
    last = (gl.max(gl.where(start < end, end, 0), AXIS) + KEYS - 1) // KEYS
    return first, gl.maximum(last - first, 0)


@gluon.jit
def _tiles_of_block(problem, block, QUERIES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    start, end = key_range(problem, block * QUERIES + gl.arange(0, QUERIES, LAYOUT))
    return _tiles(problem, start, end, 0)


@gluon.constexpr_function
def _scanned_blocks(queries):
    return min(_SCANNED_QUERIES // queries, _MOST_SCANNED)


@gluon.constexpr_function
def _scan_layout(queries):
    """Layout of queries [blocks, queries of a block]: up to 8 of a block in a thread."""
    threads = max(queries // 8, 1)
    return gl.BlockedLayout([1, min(queries, 8)], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def _tiles_of_blocks(problem, first_block, QUERIES: gl.constexpr):
    """Tiles of the next blocks; 0 behind the last one."""
    LAYOUT: gl.constexpr = _scan_layout(QUERIES)
    block = first_block + gl.arange(0, _scanned_blocks(QUERIES), gl.SliceLayout(1, LAYOUT))
    query = gl.arange(0, QUERIES, gl.SliceLayout(0, LAYOUT))
    start, end = key_range(problem, block[:, None] * QUERIES + query[None, :])
    _, tiles = _tiles(problem, start, end, 1)
    return gl.convert_layout(tiles, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def first_segment(problem, QUERIES: gl.constexpr):
    """Where the program's part of the list begins."""
    SCANNED: gl.constexpr = _scanned_blocks(QUERIES)
    num_blocks = (problem.num_queries + QUERIES - 1) // QUERIES
    total = gl.to_tensor(0)
    for first in range(0, num_blocks, SCANNED):
        total += gl.sum(_tiles_of_blocks(problem, first, QUERIES), 0)
    part = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = gl.minimum(gl.program_id(0) * part, total)
    left = gl.minimum(total - begin, part)

    block = gl.to_tensor(0)
    before = gl.to_tensor(0)
    scanned = gl.to_tensor(0)
    for first in range(0, num_blocks, SCANNED):
        tiles = _tiles_of_blocks(problem, first, QUERIES)
        ends = scanned + gl.associative_scan(tiles, 0, _add)
        passed = ends <= begin
        block += gl.sum(passed.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
        scanned += gl.sum(tiles, 0)
    first_tile, tiles = _tiles_of_block(problem, block, QUERIES)
    skipped = begin - before
    return Segment(block, (first_tile + skipped) * KEYS, gl.minimum(tiles - skipped, left), left)


@gluon.jit
def next_segment(problem, segment, QUERIES: gl.constexpr):
    """The next block that sees any keys."""
    left = segment.left - segment.tiles
    block = segment.block + 1
    first_tile, tiles = _tiles_of_block(problem, block, QUERIES)
    while (tiles == 0) & (block * QUERIES < problem.num_queries):
        block += 1
        first_tile, tiles = _tiles_of_block(problem, block, QUERIES)
    return Segment(block, first_tile * KEYS, gl.minimum(tiles, left), left)
