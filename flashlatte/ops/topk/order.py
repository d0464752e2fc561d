"""Loading of rows and entries for all kernels of ``topk``: entries are compared as ordered integers."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import to_float32

# Below every entry's key.
OUTSIDE = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-(2**31) + 1)
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def row_range(start, end, row, width, start_stride, end_stride, next_n, PER_REQUEST: tl.constexpr):
    """First column and end (exclusive) of a row, int64, within the width."""
    first = tl.zeros([], tl.int64)
    last = width
    if start is not None:
        first = tl.minimum(tl.maximum(tl.load(start + row * start_stride).to(tl.int64), 0), width)
    if end is not None:
        if PER_REQUEST:
            request = row // next_n
            last = tl.load(end + request * end_stride).to(tl.int64) - next_n + 1 + (row - request * next_n)
        else:
            last = tl.load(end + row * end_stride).to(tl.int64)
    return first, tl.maximum(tl.minimum(last, width), first)


@triton.jit
def load_values(pointers, inside, INTERPRETED: tl.constexpr):
    """float32 entries, 0 where not inside."""
    return to_float32(tl.load(pointers, mask=inside, other=0.0), INTERPRETED)


@triton.jit
def ordered(x, inside):
    """int32 keys in the order of float32 x: LOWEST for NaN, the same for -0 and 0, OUTSIDE where not inside."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(x == x, keys, LOWEST)
    return tl.where(inside, keys, OUTSIDE)


@triton.jit
def store_all(entries, index_row, value_row, position, length, k, INTERPRETED: tl.constexpr):
    """Write all ``length`` <= k entries, followed by padding."""
    inside = position < length
    tl.store(index_row + position, tl.where(inside, position, -1), mask=position < k)
    if value_row is not None:
        value = to_float32(tl.load(entries + position, mask=inside, other=0.0), INTERPRETED)
        tl.store(value_row + position, tl.where(inside, value, float("-inf")), mask=position < k)


@triton.jit
def store_chosen(entries, index_row, value_row, chosen, position, columns, INTERPRETED: tl.constexpr):
    tl.store(index_row + position, columns.to(tl.int32), mask=chosen)
    if value_row is not None:
        value = to_float32(tl.load(entries + columns, mask=chosen, other=0.0), INTERPRETED)
        tl.store(value_row + position, value, mask=chosen)
