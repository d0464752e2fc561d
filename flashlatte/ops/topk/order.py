"""Loading of rows and entries for all kernels of ``topk``: entries are compared as ordered integers."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.ops.topk.reference import TopkParams
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64, Pointer
from flashlatte.runtime.strides import first_stride, stride_in_use

# Below every entry's key.
OUTSIDE = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-(2**31) + 1)
HIGHEST = tl.constexpr(2**31 - 1)


class TopkRows(NamedTuple):
    """logits [rows, width], and the columns of each row: start [rows], None for 0; end [rows], or [rows / next_n] per
    request, None for width."""

    logits: Pointer
    stride: Int64
    width: Int64
    start: ElementPointer
    start_stride: Int64
    end: ElementPointer
    end_stride: Int64
    next_n: Int32


def rows_of(params: TopkParams) -> TopkRows:
    logits, start, end = params.logits, params.start, params.end
    columns = start, first_stride(start), end, first_stride(end)
    return TopkRows(logits, stride_in_use(logits, 0), logits.shape[1], *columns, params.next_n)


@triton.jit
def row_range(rows, row, PER_REQUEST: tl.constexpr):
    """First column and end (exclusive) of a row, int64, within the width."""
    first = tl.zeros([], tl.int64)
    last = rows.width
    if rows.start is not None:
        first = tl.load(rows.start + row * rows.start_stride).to(tl.int64)
        first = tl.minimum(tl.maximum(first, 0), rows.width)
    if rows.end is not None:
        if PER_REQUEST:
            request = row // rows.next_n
            # At least 0, so that no difference wraps round.
            last = tl.maximum(tl.load(rows.end + request * rows.end_stride).to(tl.int64), 0)
            last = last - rows.next_n + 1 + (row - request * rows.next_n)
        else:
            last = tl.load(rows.end + row * rows.end_stride).to(tl.int64)
    return first, tl.maximum(tl.minimum(last, rows.width), first)


@triton.jit
def load_values(pointers, inside):
    """float32 entries, 0 where not inside."""
    return to_float32(tl.load(pointers, mask=inside, other=0.0))


@triton.jit
def ordered(x, inside):
    """int32 keys in the order of float32 x: LOWEST for NaN, the same for -0 and 0, OUTSIDE where not inside."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(x == x, keys, LOWEST)
    return tl.where(inside, keys, OUTSIDE)
