"""The k largest entries of a row: selected from its candidates if possible, else from the row itself."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.block_tables import RowTables
from flashlatte.ops.topk.order import OUTSIDE, TopkRows, load_values, ordered, row_range
from flashlatte.ops.topk.outputs import RowResults, TopkOutputs, row_table_of, store_all, store_chosen, store_reaching
from flashlatte.ops.topk.portable.filter import TopkCandidates, threshold
from flashlatte.runtime.triton_kernel import kernel

DIGITS = tl.constexpr(256)


@kernel
def finish_kernel(
    rows: TopkRows,
    outputs: TopkOutputs,
    tables: RowTables,
    candidates: TopkCandidates,
    first_row: tl.int64,
    PER_REQUEST: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """If candidates are None, rows have at most CAPACITY entries. SPLIT: rows have several chunks of candidates."""
    program = tl.program_id(0).to(tl.int64)
    row = first_row + program
    first, last = row_range(rows, row, PER_REQUEST)
    length = (last - first).to(tl.int32)
    entries = rows.logits + row * rows.stride + first
    results = RowResults(
        outputs.indices + row * outputs.index_stride,
        None if outputs.top_values is None else outputs.top_values + row * outputs.value_stride,
        None if tables.block_table is None else row_table_of(tables, row),
    )
    k = outputs.k

    position = tl.arange(0, CAPACITY)
    if length <= k:
        store_all(entries, results, length, k, CAPACITY, BLOCK)
    elif candidates.keys is None:
        keys = ordered(load_values(entries + position, position < length), position < length)
        chosen, rank = find_largest(keys, k)
        store_chosen(entries, results, chosen, rank, position)
    else:
        # [CAPACITY]: indices of the concatenated candidates of all chunks
        source = position
        if SPLIT:
            total = tl.zeros([], tl.int32)
            for chunk in range(candidates.chunks):
                source = tl.where(position >= total, chunk * CAPACITY + position - total, source)
                # More than CAPACITY candidates in a chunk are too many; the clamp keeps the sum below 2^31.
                count = tl.load(candidates.counts + program * candidates.chunks + chunk)
                count = tl.minimum(count, CAPACITY + 1)
                total = tl.minimum(total + count, CAPACITY + 1)
        else:
            total = tl.load(candidates.counts + program)
        if (total >= k) & (total <= CAPACITY):
            taken = position < total
            base = program * candidates.chunks * CAPACITY
            keys = tl.load(candidates.keys + base + source, mask=taken, other=OUTSIDE)
            chosen, rank = find_largest(keys, k)
            columns = tl.load(candidates.columns + base + source, mask=chosen, other=0)
            store_chosen(entries, results, chosen, rank, columns)
        else:
            store_largest_by_radix(entries, results, length, k, BLOCK)


@triton.jit
def find_largest(keys, k):
    """The mask of the k largest of at least k keys in ascending order of column, and their ranks in that order."""
    cutoff = threshold(keys, k)
    above = (keys > cutoff).to(tl.int32)
    ties = (keys == cutoff).to(tl.int32)
    ties_taken = k - tl.sum(above, axis=0)
    # Both counts in one sum: neither reaches 2^15.
    both = (above << 16) | ties
    before = tl.cumsum(both, axis=0) - both
    above_before, ties_before = before >> 16, before & 0xFFFF
    chosen = (above == 1) | ((ties == 1) & (ties_before < ties_taken))
    return chosen, above_before + tl.minimum(ties_before, ties_taken)


@triton.jit
def store_largest_by_radix(entries, results, length, k, BLOCK: tl.constexpr):
    """Select the k largest of ``length`` > k entries by radix: one pass for every eight bits of the keys, and one to
    write."""
    settled = tl.zeros([], tl.int64)
    rank = k
    digit = tl.arange(0, DIGITS)
    for step in range(4):
        shift = 24 - 8 * step
        histogram = tl.zeros([DIGITS], tl.int32)
        for block in range(0, length, BLOCK):
            column = block + tl.arange(0, BLOCK)
            inside = column < length
            keys = ordered(load_values(entries + column, inside), inside)
            digits = (keys ^ OUTSIDE).to(tl.uint32, bitcast=True) >> shift
            undecided = inside & ((digits >> 8) == settled.to(tl.uint32))
            histogram += tl.histogram((digits & 255).to(tl.int32), DIGITS, mask=undecided)
        # Entries with this digit or a higher one.
        reaching = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram
        chosen = tl.max(tl.where(reaching >= rank, digit, 0), axis=0)
        rank -= tl.sum(tl.where(digit == chosen, reaching - histogram, 0), axis=0)
        settled = settled * 256 + chosen
    cutoff = (settled - 0x80000000).to(tl.int32)
    # ``rank`` of the entries that equal the k-th are taken, the first ones.
    store_reaching(entries, results, length, cutoff, rank, BLOCK)
