"""The candidates of a row: entries that reach a threshold estimated from a sample."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.ops.topk.order import HIGHEST, LOWEST, OUTSIDE, TopkRows, load_values, ordered, row_range
from flashlatte.runtime.kernel_records import Int32, Pointer
from flashlatte.runtime.triton_kernel import kernel

# Adjacent entries of a sample: a cache line.
RUN = tl.constexpr(32)


class TopkCandidates(NamedTuple):
    """keys and columns [rows · chunks, CAPACITY] of the candidates in the chunks of each row, and their counts [rows ·
    chunks]; None: there are no candidates."""

    keys: Pointer
    columns: Pointer
    counts: Pointer
    chunks: Int32


@triton.jit
def threshold(keys, k):
    """A key that exactly k of ``keys`` reach, if one exists, else the k-th largest key. At least k keys are not
    OUTSIDE."""
    # As unsigned offsets from the lowest int32, so that bits can be determined from the top.
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


@kernel
def filter_kernel(
    rows: TopkRows,
    candidates: TopkCandidates,
    first_row: tl.int64,
    target: tl.int32,
    PER_REQUEST: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the candidates of one chunk of a row in order of column, and their number, which may exceed CAPACITY.

    In rows of at most CAPACITY entries, all are candidates; in longer rows, about ``target``.
    """
    program = tl.program_id(0).to(tl.int64)
    row = first_row + program // candidates.chunks
    first, last = row_range(rows, row, PER_REQUEST)
    length = (last - first).to(tl.int32)
    entries = rows.logits + row * rows.stride + first

    cutoff = tl.full([], LOWEST, tl.int32)
    if length > CAPACITY:
        spread = length // (SAMPLE // RUN)
        position = tl.arange(0, SAMPLE)
        position = (position // RUN) * spread + position % RUN
        inside = position < length
        sample = ordered(load_values(entries + position, inside), inside)
        cutoff = threshold(sample, (target.to(tl.int64) * SAMPLE // length).to(tl.int32) + 1)

    chunk_length = tl.cdiv(tl.cdiv(length, candidates.chunks), RUN) * RUN
    begin = (program % candidates.chunks).to(tl.int32) * chunk_length
    stop = tl.minimum(begin + chunk_length, length)
    key_pointers = candidates.keys + program * CAPACITY
    column_pointers = candidates.columns + program * CAPACITY
    count = tl.zeros([], tl.int32)
    column = begin + tl.arange(0, BLOCK)
    values = load_values(entries + column, column < stop)
    for block in range(begin, stop, BLOCK):
        column = block + tl.arange(0, BLOCK)
        keys = ordered(values, column < stop)
        # The next block is loaded while this one is counted.
        values = load_values(entries + (column + BLOCK), column + BLOCK < stop)
        passes = (keys >= cutoff).to(tl.int32)
        ranks = tl.cumsum(passes, axis=0)
        position = count + ranks - passes
        stored = (passes == 1) & (position < CAPACITY)
        tl.store(key_pointers + position, keys, mask=stored)
        tl.store(column_pointers + position, column, mask=stored)
        count += tl.sum(passes, axis=0)
    tl.store(candidates.counts + program, count)
