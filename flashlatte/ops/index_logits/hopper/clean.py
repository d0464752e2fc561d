"""Write -inf for keys that are masked. The logits kernels write only visible keys, so the two do not overlap."""

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.runtime.triton_kernel import kernel

# Columns that a program writes at a time.
BLOCK = 2048
# Programs per SM, to hide memory latency.
_PER_SM = 8


def programs_of_row(rows: int, width: int, num_sms: int) -> int:
    """Programs per row."""
    return max(1, min(-(-width // BLOCK), -(-_PER_SM * num_sms // rows)))


@triton.jit
def _fill(logits, first, last, BLOCK: tl.constexpr):
    """Write -inf to columns ``first`` to ``last``, divided among the programs of the row."""
    for block in range(first + tl.program_id(1) * BLOCK, last, tl.num_programs(1) * BLOCK):
        column = block + tl.arange(0, BLOCK)
        tl.store(logits + column, float("-inf"), mask=column < last)


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
    shift = start * compressed
    _fill(logits + row * stride, 0, start - shift, BLOCK)
    _fill(logits + row * stride, end - shift, width, BLOCK)


@kernel
def clean_paged_kernel(
    logits,
    stride: tl.int64,
    width: tl.int32,
    lengths,
    request_stride: tl.int64,
    token_stride: tl.int64,
    shortened: tl.int32,
    max_keys: tl.int32,
    next_n: tl.int32,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row % next_n
    length = tl.load(lengths + row // next_n * request_stride + token * token_stride).to(tl.int64)
    length = tl.maximum(length, 0)  # before the subtraction, which would overflow for the minimum int64
    end = tl.minimum(length - shortened * (next_n - 1 - token), max_keys)
    _fill(logits + row * stride, tl.maximum(end, 0), width, BLOCK)
