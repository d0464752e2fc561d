"""Write -inf for keys that are masked. The logits kernels write only visible keys, so the two do not overlap."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.ops.index_logits.hopper.scores import LogitsOutput
from flashlatte.ops.index_logits.key_ranges import KeyRanges, QueryLengths
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
def clean_ragged_kernel(output: LogitsOutput, ranges: KeyRanges, num_keys: tl.int32, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(ranges.start + row * ranges.start_stride).to(tl.int64)
    end = tl.load(ranges.end + row * ranges.end_stride).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), num_keys)
    end = tl.maximum(tl.minimum(end, num_keys), start)
    shift = start * output.compressed
    _fill(output.logits + row * output.stride, 0, start - shift, BLOCK)
    _fill(output.logits + row * output.stride, end - shift, output.width, BLOCK)


@kernel
def clean_paged_kernel(output: LogitsOutput, lengths: QueryLengths, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = row % lengths.next_n
    length = lengths.lengths + row // lengths.next_n * lengths.request_stride + token * lengths.token_stride
    # Clamp before the subtraction, which would overflow for the minimum int64.
    end = tl.maximum(tl.load(length).to(tl.int64), 0)
    if not lengths.per_query:
        end -= lengths.next_n - 1 - token
    end = tl.minimum(end, lengths.max_keys)
    _fill(output.logits + row * output.stride, tl.maximum(end, 0), output.width, BLOCK)
