"""Assignment of programs to tiles of rows of packed requests."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

# Boundaries of requests that a program loads at a time.
_CHUNK = tl.constexpr(64)


@triton.jit
def find_segment(slot, cu_rows, requests, total_rows, BLOCK: tl.constexpr):
    """(segment, its tile, its number of tiles, first row, rows) for one of ``tile_slots`` slots.

    Segment i is request i - 1, between boundaries i - 1 and i. It begins at slot ``boundary // BLOCK + i``, which
    leaves room for all its tiles and sometimes for one more, with tile >= tiles. Segments 0 and requests + 1, before
    the first and after the last boundary, belong to no request. Every row is in exactly one segment and tile, for any
    ``cu_rows``.
    """
    # The segment is the first i with max(boundaries up to i) // BLOCK + i >= slot: the minimum, over the boundaries j,
    # of the first i >= j with boundary j // BLOCK + i >= slot.
    segment = requests + 1
    for first in range(0, requests + 1, _CHUNK):
        index = first + tl.arange(0, _CHUNK)
        from_here = tl.maximum(index, slot - _value(cu_rows, index, requests, total_rows) // BLOCK)
        segment = tl.minimum(segment, tl.min(tl.where(index <= requests, from_here, requests + 1)))
    begin, rows = find_rows(segment, cu_rows, requests, total_rows)
    return segment, slot - (begin // BLOCK + segment), tl.cdiv(rows, BLOCK), begin, rows


@triton.jit
def find_segment_of_row(row, cu_rows, requests, total_rows, BLOCK: tl.constexpr):
    """``find_segment`` with one slot per row, which is assigned the tile that begins with the row, if any.

    This needs fewer slots if most requests have one or two rows.
    """
    segment = requests + 1
    for first in range(0, requests + 1, _CHUNK):
        index = first + tl.arange(0, _CHUNK)
        is_after = (index <= requests) & (_value(cu_rows, index, requests, total_rows) > row)
        segment = tl.minimum(segment, tl.min(tl.where(is_after, index, requests + 1)))
    begin, rows = find_rows(segment, cu_rows, requests, total_rows)
    tiles = tl.cdiv(rows, BLOCK)
    tile = tl.where((row - begin) % BLOCK == 0, (row - begin) // BLOCK, tiles)
    return segment, tile, tiles, begin, rows


@triton.jit
def find_rows(segment, cu, requests, total):
    """(first row, rows) of a segment. Boundaries are replaced by their running maximum, so that they never decrease."""
    begin = 0
    for first in range(0, segment, _CHUNK):
        index = first + tl.arange(0, _CHUNK)
        value = _value(cu, index, requests, total)
        begin = tl.maximum(begin, tl.max(tl.where(index < segment, value, 0)))
    end = tl.where(segment > requests, total, _value(cu, segment, requests, total))
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def _value(cu, index, requests, total):
    """cu[index] clamped to 0 … ``total``; 0 for an invalid index."""
    value = tl.load(cu + index, mask=(index >= 0) & (index <= requests), other=0).to(tl.int64)
    return tl.minimum(tl.maximum(value, 0), total.to(tl.int64)).to(tl.int32)


def tile_slots(total: int, requests: int, block: int) -> int:
    """The number of slots of ``find_segment`` for ``total`` rows."""
    return total // block + requests + 2
