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
    after the last boundary, 0 and requests + 1, belong to no request.
    """
    stretch = 0
    for first in range(0, requests + 1, _CHUNK):
        index = first + tl.arange(0, _CHUNK)
        begin = boundary(cu_rows, index, requests, total_rows)
        stretch += tl.sum(((index <= requests) & (begin // BLOCK + index + 1 <= slot)).to(tl.int32))
    begin = boundary(cu_rows, stretch - 1, requests, total_rows)
    rows = tl.maximum(boundary(cu_rows, stretch, requests, total_rows) - begin, 0)
    return stretch, slot - (begin // BLOCK + stretch), tl.cdiv(rows, BLOCK), begin, rows


@triton.jit
def boundary(cu, index, requests, total):
    """Where a request begins or the last one ends, whatever ``cu`` holds; 0 and ``total`` beyond the two ends."""
    value = tl.load(cu + index, mask=(index >= 0) & (index <= requests), other=0).to(tl.int64)
    value = tl.minimum(tl.maximum(value, 0), total.to(tl.int64)).to(tl.int32)
    return tl.where(index > requests, total, tl.where(index < 0, 0, value))


def tile_slots(total: int, requests: int, block: int) -> int:
    """Slots that ``find_stretch`` gives to ``total`` rows."""
    return total // block + requests + 2
