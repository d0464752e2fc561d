"""Select the k largest of a row's candidates in registers, and store them in ascending order of their columns."""

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_scan, shared_words
from flashlatte.ops.topk.hopper.digits import clear_bins, count_digits, resolve_digit
from flashlatte.ops.topk.hopper.shared_layout import BEFORE, BITMAP, BITMAP_WORDS, LIST, SCRATCH, SEGMENT
from flashlatte.ops.topk.outputs import results_of_columns


@triton.jit
def select_largest(keys, column, valid, low, length, k, memory, DIGIT: tl.constexpr):
    """Which candidates are the k largest. At least k candidates have keys >= ``low`` (int64).

    Radix digits have DIGIT bits: 10, or 11 if ``memory`` has 2,048 bins.
    """
    highest = tl.max(keys).to(tl.int64)
    bits = shared_words.bit_length((highest - low).to(tl.int32))
    low, rank, inside = _kth_largest(keys, valid, low, bits, k, memory, DIGIT)
    kth_key = low.to(tl.int32)
    last_tie = length
    if inside != rank:
        # Of the entries that equal the k-th, select the lowest columns: the largest values of -column.
        bits = shared_words.bit_length(length)
        ties = valid & (keys == kth_key)
        low, _, _ = _kth_largest(-column, ties, -length.to(tl.int64), bits, rank, memory, DIGIT)
        last_tie = -low.to(tl.int32)
    return valid & ((keys > kth_key) | ((keys == kth_key) & (column <= last_tie)))


@triton.jit
def _kth_largest(keys, valid, low, bits, k, memory, DIGIT: tl.constexpr):
    """A key from ``low`` to ``low + 2^bits - 1`` that exactly k keys reach, or the k-th largest key if there is none.

    Returns the key and, of the keys that are not distinguished from it, how many are among the k largest, and how many
    exist.
    """
    rank = k
    inside = k + 1
    while (bits > 0) & (inside != rank):
        clear_bins(memory, DIGIT)
        count_digits(keys, valid, low, bits, memory, DIGIT)
        low, bits, rank, inside = resolve_digit(low, bits, rank, memory, DIGIT)
    return low, rank, inside


@triton.jit
def store_in_order(results, selected, bits, column, begin, stop, memory, CAPACITY: tl.constexpr, CTAS: tl.constexpr):
    """Store the selected entries of columns ``begin`` to ``stop``; the output position is the number of selected
    columns below.

    The positions are prefix sums over a bitmap of the columns, one segment at a time. With a block table, the columns
    replace the list: no CTA reads it any more.
    """
    before = tl.zeros([], tl.int32)
    if CTAS > 1:
        before = tl.sum((selected & (column < begin)).to(tl.int32), axis=0)
    first_rank = before
    word = tl.arange(0, BITMAP_WORDS)
    bit = tl.zeros_like(column) + 1
    for segment in range(begin, stop, SEGMENT):
        shared_words.store(memory, BITMAP + word, tl.zeros_like(word), word >= 0)
        tl.debug_barrier()
        offset = column - segment
        stored = selected & (offset >= 0) & (offset < tl.minimum(stop - segment, SEGMENT))
        shared_words.set_bits(memory, BITMAP + (offset >> 5), bit << (offset & 31), stored)
        before = shared_scan.popcount_prefix_sums(memory, BITMAP, BEFORE, SCRATCH, before, BITMAP_WORDS)
        rank = shared_words.count_bits_before(memory, BITMAP, BEFORE, offset, stored)
        if results.table is None:
            tl.store(results.indices + rank, column, mask=stored)
        else:
            shared_words.store(memory, LIST + rank, column, stored)
        if results.top_values is not None:
            tl.store(results.top_values + rank, bits.to(tl.float32, bitcast=True), mask=stored)
        tl.debug_barrier()
    if results.table is not None:
        position = tl.arange(0, CAPACITY // 2)
        store_staged(results, position, (position >= first_rank) & (position < before), memory)


@triton.jit
def store_staged(results, position, stored, memory):
    """Store the columns that LIST holds, or their slots: neighboring threads store neighboring entries."""
    column = shared_words.load(memory, LIST + position, stored)
    tl.store(results.indices + position, results_of_columns(results, column, stored), mask=stored)
