"""The rows that a program computes, and the visible rows of the other side.

"Rows" and "others" are queries and keys in the forward kernel and for dQ, and keys and queries for dK and dV.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import load_rows
from flashlatte.kernels.triton.ragged_tiles import find_rows, find_segment


@triton.jit
def find_tile(slot, cu_rows, cu_others, requests, total_rows, total_others, BLOCK: tl.constexpr):
    """(tile of its request, tiles, first row, rows, first of the others, others) for one of ``tile_slots`` slots.

    A tile beyond the last is empty; a tile of no request has no others.
    """
    stretch, tile, tiles, begin, rows = find_segment(slot, cu_rows, requests, total_rows, BLOCK)
    others_begin, others = find_rows(stretch, cu_others, requests, total_others)
    others = tl.where((stretch > 0) & (stretch <= requests), others, 0)
    return tile, tiles, begin, rows, others_begin, others


@triton.jit
def visible_range(own, others, shift, before, after):
    """The first and last visible other of a row: position own + shift, minus ``before``, plus ``after``."""
    position = own.to(tl.int64) + shift
    lower = tl.maximum(position - before, 0)
    upper = tl.minimum(position + after, others.to(tl.int64) - 1)
    return tl.minimum(lower, others).to(tl.int32), tl.maximum(upper, -1).to(tl.int32)


@triton.jit
def seen_by_some(rows, others, shift, before, after):
    """(first, limit) of the rows with a visible other."""
    shift = shift.to(tl.int64)
    first = tl.minimum(tl.maximum(-(shift + after), 0), rows)
    limit = tl.minimum(tl.maximum(others - shift + before, 0), rows)
    return first.to(tl.int32), limit.to(tl.int32)


@triton.jit
def phases(first, rows, others, shift, before, after, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(begin, seen, full, partial, end) of the others that are visible to a tile of rows, in steps of BLOCK from begin:
    each of seen to end - 1 is visible to some row, and each of full to partial - 1 to all rows.
    """
    last = tl.minimum(first + BLOCK_ROWS, rows) - 1
    seen, first_upper = visible_range(first, others, shift, before, after)
    last_lower, last_upper = visible_range(last, others, shift, before, after)
    end = tl.where(first < rows, last_upper + 1, 0)
    return seen // BLOCK * BLOCK, seen, tl.cdiv(last_lower, BLOCK) * BLOCK, (first_upper + 1) // BLOCK * BLOCK, end


@triton.jit
def load_tile(
    base,
    stride,
    start,
    seen,
    limit,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Columns FIRST to FIRST + COUNT of rows ``start`` to start + ROWS, [ROWS, WIDTH]; 0 from row ``limit`` on, and
    before row ``seen`` if that is not None.
    """
    row = tl.arange(0, ROWS)
    offsets = row.to(tl.int64) * stride * ALIGN
    in_use = row < limit - start
    if seen is not None:
        in_use = in_use & (row >= seen - start)
    return load_rows(base + stride * start * ALIGN, offsets, in_use, FIRST, COUNT, WIDTH, INTERPRETED)


@triton.jit
def load_parts(
    base,
    stride,
    start,
    seen,
    limit,
    COUNT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    WIDTH_B: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """COUNT columns of rows of q or k as two tiles of the widths of ``head_dims.tile_widths``; if WIDTH_B is 0, the
    second is the first again.
    """
    first = load_tile(base, stride, start, seen, limit, 0, min(COUNT, WIDTH_A), WIDTH_A, ROWS, ALIGN, INTERPRETED)
    second = first
    if WIDTH_B > 0:
        second = load_tile(
            base, stride, start, seen, limit, WIDTH_A, COUNT - WIDTH_A, WIDTH_B, ROWS, ALIGN, INTERPRETED
        )
    return first, second


@triton.jit
def load_parts_and_dot(
    x,
    x_rest,
    base,
    stride,
    start,
    seen,
    limit,
    COUNT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    WIDTH_B: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Rows y as by ``load_parts``, and x yᵀ; the second part is loaded when the first has been multiplied."""
    y = load_tile(base, stride, start, seen, limit, 0, min(COUNT, WIDTH_A), WIDTH_A, ROWS, ALIGN, INTERPRETED)
    product = tl.dot(x, tl.trans(y))
    y_rest = y
    if WIDTH_B > 0:
        y_rest = load_tile(
            base, stride, start, seen, limit, WIDTH_A, COUNT - WIDTH_A, WIDTH_B, ROWS, ALIGN, INTERPRETED
        )
        product = tl.dot(x_rest, tl.trans(y_rest), product)
    return y, y_rest, product
