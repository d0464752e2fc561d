"""Entries as ordered integers, and the k-th largest of those that a program holds in registers."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import widen

# Below every entry's key.
OUTSIDE = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-(2**31) + 1)
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def row_range(start, end, row, width, start_stride, end_stride, next_n, PER_REQUEST: tl.constexpr):
    """First column of a row and the one behind its last, int64, within the width."""
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
    return widen(tl.load(pointers, mask=inside, other=0.0), INTERPRETED)


@triton.jit
def ordered(x, inside):
    """int32 that are ordered as float32 x is: NaN gives LOWEST, -0 what 0 does, and what is not inside OUTSIDE."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(x == x, keys, LOWEST)
    return tl.where(inside, keys, OUTSIDE)


@triton.jit
def threshold(keys, k):
    """A key that exactly k of ``keys`` reach, if there is one, else the k-th largest. At least k are not OUTSIDE."""
    # As offsets from the least int32, so that bits can be settled from the top.
    low = tl.min(tl.where(keys == OUTSIDE, HIGHEST, keys), axis=0).to(tl.int64) + 0x80000000
    high = tl.max(keys, axis=0).to(tl.int64) + 0x80000000
    different = low ^ high
    bit = tl.zeros([], tl.int32) + 31
    while (bit >= 0) & ((different >> tl.maximum(bit, 0)) == 0):
        bit -= 1
    # Bits above are the same in all keys.
    settled = (low >> (bit + 1)) << (bit + 1)
    reached = k + 1
    while (bit >= 0) & (reached != k):
        candidate = settled | (tl.full([], 1, tl.int64) << bit)
        count = tl.sum((keys >= (candidate - 0x80000000).to(tl.int32)).to(tl.int32), axis=0)
        settled = tl.where(count >= k, candidate, settled)
        reached = tl.where(count >= k, count, reached)
        bit -= 1
    return (settled - 0x80000000).to(tl.int32)
