"""The k largest of a row's candidates, which a CTA holds in registers, stored in ascending order of their columns."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_ranks, shared_words
from flashlatte.ops.topk.hopper.digits import clear_bins, count_digits, settle_digit
from flashlatte.ops.topk.hopper.memory import BEFORE, BITMAP, BITMAP_WORDS, SCRATCH, SEGMENT


@triton.jit
def are_largest(keys, column, there, low, length, k, memory, INTERPRETED: tl.constexpr):
    """Which of a row's candidates, at least k whose keys reach ``low`` (int64), are the k largest."""
    highest = tl.max(keys, axis=0).to(tl.int64)
    bits = shared_words.bits_of((highest - low).to(tl.int32), INTERPRETED)
    low, wanted, inside = _kth_largest(keys, there, low, bits, k, memory, INTERPRETED)
    least = low.to(tl.int32)
    last_tie = length
    if inside != wanted:
        # The first columns of the entries that equal the k-th, found as the largest of -column.
        bits = shared_words.bits_of(length, INTERPRETED)
        ties = there & (keys == least)
        low, _, _ = _kth_largest(-column, ties, -length.to(tl.int64), bits, wanted, memory, INTERPRETED)
        last_tie = -low.to(tl.int32)
    return there & ((keys > least) | ((keys == least) & (column <= last_tie)))


@triton.jit
def _kth_largest(keys, there, low, bits, k, memory, INTERPRETED: tl.constexpr):
    """A key from ``low`` to ``low + 2^bits - 1`` that exactly k keys reach, or the k-th largest if none is.

    Returns the key, and of the keys that nothing tells from it how many are among the k largest, and how many there
    are.
    """
    wanted = k
    inside = k + 1
    while (bits > 0) & (inside != wanted):
        clear_bins(memory, 10, INTERPRETED)
        count_digits(keys, there, low, bits, memory, 10, INTERPRETED)
        low, bits, wanted, inside = settle_digit(low, bits, wanted, memory, 10, INTERPRETED)
    return low, wanted, inside


@triton.jit
def store_in_order(
    index_row,
    value_row,
    chosen,
    bits,
    column,
    begin,
    stop,
    memory,
    CTAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store the chosen entries from column ``begin`` to ``stop``: each where as many columns of all that are chosen are
    lower.

    How many those are is read from a bitmap of the columns, a segment of them at a time.
    """
    before = tl.zeros([], tl.int32)
    if CTAS > 1:
        before = tl.sum((chosen & (column < begin)).to(tl.int32), axis=0)
    word = tl.arange(0, BITMAP_WORDS)
    one = tl.zeros_like(column) + 1
    for segment in range(begin, stop, SEGMENT):
        shared_words.store(memory, BITMAP + word, tl.zeros_like(word), word >= 0, INTERPRETED)
        tl.debug_barrier()
        offset = column - segment
        stored = chosen & (offset >= 0) & (offset < tl.minimum(stop - segment, SEGMENT))
        shared_words.set_bits(memory, BITMAP + (offset >> 5), one << (offset & 31), stored, INTERPRETED)
        before = shared_ranks.sum_ones(memory, BITMAP, BEFORE, SCRATCH, before, BITMAP_WORDS, INTERPRETED)
        rank = shared_words.ones_before(memory, BITMAP, BEFORE, offset, stored, INTERPRETED)
        tl.store(index_row + rank, column, mask=stored)
        if value_row is not None:
            tl.store(value_row + rank, bits.to(tl.float32, bitcast=True), mask=stored)
        tl.debug_barrier()
