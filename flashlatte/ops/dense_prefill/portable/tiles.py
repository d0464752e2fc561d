"""The rows that a program computes, and the visible rows of the other side.

"Rows" and "others" are queries and keys in the forward kernel and for dQ, and keys and queries for dK and dV.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import from_float32
from flashlatte.kernels.triton.online_softmax import load_rows
from flashlatte.kernels.triton.ragged_tiles import find_rows, find_segment
from flashlatte.kernels.triton.rows import HeadRows, head_row


class DensePrefillStep(NamedTuple):
    """The constants of the kernels.

    Attributes:
        head_dim, first, rest: elements of a key, and the widths of its two tiles; rest is 0 if one tile suffices.
        head_dim_v, width_v: elements of a value, and the width of its tile.
        block_m, block_n: queries and keys of a tile; the program's own tile and the loop's.
        num_stages: pipeline stages of the loop over keys.
        branches: whether the forward loop applies masks in a branch.
    """

    head_dim: int
    first: int
    rest: int
    head_dim_v: int
    width_v: int
    block_m: int
    block_n: int
    num_stages: int
    branches: bool


class TileOfQueries(NamedTuple):
    """The queries of a program, and their request's keys, which the program visits from ``begin`` to ``stop``.

    Attributes:
        q_begin, s_q, k_begin, s_k: first query and key of the request, and their numbers.
        first, row: index of the first query in the request, and of each query [block_m].
        lower, upper: [block_m], first and last key that is visible to each query.
        begin, seen, full, partial, stop: results of ``phases``.
    """

    q_begin: Any
    s_q: Any
    k_begin: Any
    s_k: Any
    first: Any
    row: Any
    lower: Any
    upper: Any
    begin: Any
    seen: Any
    full: Any
    partial: Any
    stop: Any


@triton.jit
def find_queries(slot, requests, window, step: tl.constexpr):
    """The queries of one of ``tile_slots`` slots; the first slots of a request have its last queries, which have the
    most visible keys."""
    tile, tiles, q_begin, s_q, k_begin, s_k = find_tile(
        slot,
        requests.cu_seqlens_q,
        requests.cu_seqlens_k,
        requests.count,
        requests.total_q,
        requests.total_k,
        step.block_m,
    )
    first = tl.where(tile < tiles, (tiles - 1 - tile) * step.block_m, s_q)
    shift = s_k - s_q
    begin, seen, full, partial, stop = phases(
        first, s_q, s_k, shift, window.left, window.right, step.block_m, step.block_n
    )
    row = first + tl.arange(0, step.block_m)
    lower, upper = visible_range(row, s_k, shift, window.left, window.right)
    return TileOfQueries(q_begin, s_q, k_begin, s_k, first, row, lower, upper, begin, seen, full, partial, stop)


@triton.jit
def find_tile(slot, cu_rows, cu_others, requests, total_rows, total_others, BLOCK: tl.constexpr):
    """(tile of its request, tiles, first row, rows, first of the others, others) for one of ``tile_slots`` slots.

    A slot after the last tile is empty; a tile of rows outside every request has no others.
    """
    segment, tile, tiles, begin, rows = find_segment(slot, cu_rows, requests, total_rows, BLOCK)
    others_begin, others = find_rows(segment, cu_others, requests, total_others)
    others = tl.where((segment > 0) & (segment <= requests), others, 0)
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
def rows_of(rows, token, head):
    """``rows`` from ``token`` on, of one head."""
    return HeadRows(head_row(rows, token, head), rows.token_stride, rows.head_stride, rows.align)


@triton.jit
def load_tile(
    rows,
    start,
    seen,
    limit,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Columns FIRST to FIRST + COUNT of rows ``start`` to start + BLOCK, [BLOCK, WIDTH]; 0 from row ``limit`` on, and
    before row ``seen`` if that is not None.
    """
    row = tl.arange(0, BLOCK)
    stride = rows.token_stride
    offsets = row.to(tl.int64) * stride * rows.align
    in_use = row < limit - start
    if seen is not None:
        in_use = in_use & (row >= seen - start)
    return load_rows(rows.start + stride * start * rows.align, offsets, in_use, FIRST, COUNT, WIDTH)


@triton.jit
def load_values(rows, start, seen, limit, BLOCK: tl.constexpr, step: tl.constexpr):
    """Rows of v or dout as one tile [BLOCK, width_v]."""
    return load_tile(rows, start, seen, limit, 0, step.head_dim_v, step.width_v, BLOCK)


@triton.jit
def _load_first(rows, start, seen, limit, BLOCK: tl.constexpr, step: tl.constexpr):
    return load_tile(rows, start, seen, limit, 0, min(step.head_dim, step.first), step.first, BLOCK)


@triton.jit
def _load_rest(rows, start, seen, limit, BLOCK: tl.constexpr, step: tl.constexpr):
    return load_tile(rows, start, seen, limit, step.first, step.head_dim - step.first, step.rest, BLOCK)


@triton.jit
def load_parts(rows, start, seen, limit, BLOCK: tl.constexpr, step: tl.constexpr):
    """Rows of q or k as two tiles [BLOCK, first] and [BLOCK, rest]; if there is no rest, the second is the first
    again."""
    first = _load_first(rows, start, seen, limit, BLOCK, step)
    rest = first
    if step.rest > 0:
        rest = _load_rest(rows, start, seen, limit, BLOCK, step)
    return first, rest


@triton.jit
def load_parts_and_dot(x, x_rest, rows, start, seen, limit, BLOCK: tl.constexpr, step: tl.constexpr):
    """Rows y as by ``load_parts``, and x yᵀ; the second part is loaded when the first has been multiplied."""
    y = _load_first(rows, start, seen, limit, BLOCK, step)
    product = tl.dot(x, tl.trans(y))
    y_rest = y
    if step.rest > 0:
        y_rest = _load_rest(rows, start, seen, limit, BLOCK, step)
        product = tl.dot(x_rest, tl.trans(y_rest), product)
    return y, y_rest, product


@triton.jit
def store_columns(rows, tile, in_use, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Store a tile [rows, width] to elements FIRST to FIRST + COUNT of the rows at pointers ``rows`` [rows, 1]."""
    cols = tl.arange(0, tile.shape[1])
    mask = in_use[:, None] & (cols < COUNT)[None, :]
    tl.store(rows + (FIRST + cols)[None, :], from_float32(tile, rows.dtype.element_ty), mask=mask)


@triton.jit
def store_parts(rows, first, rest, factor, in_use, step: tl.constexpr):
    """Store ``factor`` times the two tiles of a gradient of q or k to the rows at pointers ``rows`` [rows, 1]."""
    store_columns(rows, first * factor, in_use, 0, min(step.head_dim, step.first))
    if step.rest > 0:
        store_columns(rows, rest * factor, in_use, step.first, step.head_dim - step.first)
