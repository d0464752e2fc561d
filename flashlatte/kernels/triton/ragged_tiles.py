"""Which tile of rows of which request a program computes, where requests are packed one after the other."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

# Boundaries of requests that a program looks at together.
_CHUNK = tl.constexpr(64)


@triton.jit
def find_stretch(slot, cu_rows, requests, total_rows, BLOCK: tl.constexpr):
    """(stretch, tile of it, tiles, first row, rows) for one of ``tile_slots`` slots.

    Stretch i is request i - 1, between boundaries i - 1 and i. It begins at slot ``boundary // BLOCK + i``: that leaves
    room for all its tiles, and sometimes for one more, which has tile >= tiles. The stretches before the first and
    after the last boundary, 0 and requests + 1, belong to no request. So every row has one stretch and one tile,
    whatever ``cu_rows`` holds.
    """
    # The stretch is the first i with max(boundaries up to i) // BLOCK + i >= slot. For one boundary j that is the first
    # i >= j with boundary j // BLOCK + i >= slot, and of these the least.
    stretch = requests + 1
    for first in range(0, requests + 1, _CHUNK):
        index = first + tl.arange(0, _CHUNK)
        from_here = tl.maximum(index, slot - _value(cu_rows, index, requests, total_rows) // BLOCK)
        stretch = tl.minimum(stretch, tl.min(tl.where(index <= requests, from_here, requests + 1)))
    begin, rows = find_rows(stretch, cu_rows, requests, total_rows)
    return stretch, slot - (begin // BLOCK + stretch), tl.cdiv(rows, BLOCK), begin, rows


@triton.jit
def find_stretch_of_row(row, cu_rows, requests, total_rows, BLOCK: tl.constexpr):
    """``find_stretch`` where each row has a slot, which holds the tile that begins with it, if one does.

    That is fewer slots where most requests have a row or two.
    """
    stretch = requests + 1
    for first in range(0, requests + 1, _CHUNK):
        index = first + tl.arange(0, _CHUNK)
        is_behind = (index <= requests) & (_value(cu_rows, index, requests, total_rows) > row)
        stretch = tl.minimum(stretch, tl.min(tl.where(is_behind, index, requests + 1)))
    begin, rows = find_rows(stretch, cu_rows, requests, total_rows)
    tiles = tl.cdiv(rows, BLOCK)
    tile = tl.where((row - begin) % BLOCK == 0, (row - begin) // BLOCK, tiles)
    return stretch, tile, tiles, begin, rows


@triton.jit
def find_rows(stretch, cu, requests, total):
    """(first row, rows) of a stretch. A boundary is the largest value up to it, so that none lies before another."""
    begin = 0
    for first in range(0, stretch, _CHUNK):
        index = first + tl.arange(0, _CHUNK)
        value = _value(cu, index, requests, total)
        begin = tl.maximum(begin, tl.max(tl.where(index < stretch, value, 0)))
    end = tl.where(stretch > requests, total, _value(cu, stretch, requests, total))
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def _value(cu, index, requests, total):
    """cu[index] between 0 and ``total``; 0 for an index that is none."""
    value = tl.load(cu + index, mask=(index >= 0) & (index <= requests), other=0).to(tl.int64)
    return tl.minimum(tl.maximum(value, 0), total.to(tl.int64)).to(tl.int32)


def tile_slots(total: int, requests: int, block: int) -> int:
    """Slots that ``find_stretch`` gives to ``total`` rows."""
    return total // block + requests + 2
