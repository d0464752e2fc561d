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
        tl.store(logits + row * stride + column, float("-inf"), mask=outside & (column < width))


@kernel
def clean_ragged_kernel(
    logits,
    stride: tl.int64,
    width: tl.int32,
    key_start,
    start_stride: tl.int64,
    key_end,
    end_stride: tl.int64,
    num_keys: tl.int32,
    compressed: tl.int32,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(key_start + row * start_stride).to(tl.int64)
    end = tl.load(key_end + row * end_stride).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), num_keys)
    end = tl.maximum(tl.minimum(end, num_keys), start)
    _fill_outside(logits, row, stride, width, start - start * compressed, end - start * compressed, BLOCK)


@kernel
def clean_paged_kernel(
    logits,
    stride: tl.int64,
    width: tl.int32,
    lengths,
    request_stride: tl.int64,
    token_stride: tl.int64,
    shortened: tl.int32,
    most_keys: tl.int32,
    next_n: tl.int32,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row % next_n
    length = tl.load(lengths + row // next_n * request_stride + token * token_stride).to(tl.int64)
    end = tl.minimum(length - shortened * (next_n - 1 - token), most_keys)
    _fill_outside(logits, row, stride, width, 0, tl.maximum(end, 0), BLOCK)
