"""The candidates of a row: entries that reach a threshold estimated from a sample."""

from __future__ import annotations

import triton.language as tl

from flashlatte.ops.topk.order import LOWEST, load_values, ordered, row_range
from flashlatte.ops.topk.portable.threshold import threshold
from flashlatte.runtime.triton_kernel import kernel

# Adjacent entries of a sample: a cache line.
RUN = tl.constexpr(32)


@kernel
def filter_kernel(
    logits,
    start,
    end,
    candidate_keys,
    candidate_columns,
    counts,
    first_row: tl.int64,
    width: tl.int64,
    chunks: tl.int32,
    wanted: tl.int32,
    next_n: tl.int32,
    logits_stride: tl.int64,
    start_stride: tl.int64,
    end_stride: tl.int64,
    PER_REQUEST: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the candidates of one chunk of a row in order of column, and their number, which may exceed CAPACITY.

    In rows of at most CAPACITY entries, all are candidates; in longer rows, about ``wanted``.
    """
    program = tl.program_id(0).to(tl.int64)
    row = first_row + program // chunks
    first, last = row_range(start, end, row, width, start_stride, end_stride, next_n, PER_REQUEST)
    length = (last - first).to(tl.int32)
    entries = logits + row * logits_stride + first

    cutoff = tl.full([], LOWEST, tl.int32)
    if length > CAPACITY:
        spread = length // (SAMPLE // RUN)
        position = tl.arange(0, SAMPLE)
        position = (position // RUN) * spread + position % RUN
        inside = position < length
        sample = ordered(load_values(entries + position, inside, INTERPRETED), inside)
        cutoff = threshold(sample, (wanted.to(tl.int64) * SAMPLE // length).to(tl.int32) + 1)

    chunk_length = tl.cdiv(tl.cdiv(length, chunks), RUN) * RUN
    begin = (program % chunks).to(tl.int32) * chunk_length
    stop = tl.minimum(begin + chunk_length, length)
    key_places = candidate_keys + program * CAPACITY
    column_places = candidate_columns + program * CAPACITY
    count = tl.zeros([], tl.int32)
    column = begin + tl.arange(0, BLOCK)
    values = load_values(entries + column, column < stop, INTERPRETED)
    for block in range(begin, stop, BLOCK):
        column = block + tl.arange(0, BLOCK)
        keys = ordered(values, column < stop)
        # The next block is loaded while this one is counted.
        values = load_values(entries + (column + BLOCK), column + BLOCK < stop, INTERPRETED)
        passes = (keys >= cutoff).to(tl.int32)
        ranks = tl.cumsum(passes, axis=0)
        position = count + ranks - passes
        stored = (passes == 1) & (position < CAPACITY)
        tl.store(key_places + position, keys, mask=stored)
        tl.store(column_places + position, column, mask=stored)
        count += tl.sum(passes, axis=0)
    tl.store(counts + program, count)
