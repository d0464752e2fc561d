"""What no query sees becomes -inf. The other kernels write nothing but what is seen, so the two never meet."""

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.runtime.triton_kernel import kernel

# Columns of a program.
BLOCK = 8192


@triton.jit
def _fill_outside(logits, row, stride, width, start, end, BLOCK: tl.constexpr):
    first = tl.program_id(1).to(tl.int64) * BLOCK
    if (first < start) | (tl.minimum(first + BLOCK, width) > end):
        column = first + tl.arange(0, BLOCK)
        outside = (column < start) | (column >= end)
        tl.store(logits + row.to(tl.int64) * stride + column, float("-inf"), mask=outside & (column < width))


@kernel
def clean_ragged_kernel(
    logits,
    stride: tl.int64,
    width: tl.int32,
    key_start,
    key_end,
    num_keys: tl.int32,
    compressed: tl.int32,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.maximum(tl.load(key_start + row), 0)
    end = tl.minimum(tl.load(key_end + row), num_keys)
    shift = start * compressed
    _fill_outside(logits, row, stride, width, start - shift, tl.maximum(end, start) - shift, BLOCK)


@kernel
def clean_paged_kernel(
    logits,
    stride: tl.int64,
    width: tl.int32,
    lengths,
    length_columns: tl.int32,
    shortened: tl.int32,
    most_keys: tl.int32,
    next_n: tl.int32,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = row % next_n
    address = tl.where(length_columns > 1, row, row // next_n)
    end = tl.load(lengths + address) - shortened * (next_n - 1 - token)
    end = tl.minimum(end, most_keys)
    _fill_outside(logits, row, stride, width, 0, tl.maximum(end, 0), BLOCK)
