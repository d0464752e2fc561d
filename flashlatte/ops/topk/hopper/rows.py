"""The k-th largest entry of a row that is read from global memory once for each digit."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_ranks, shared_words
from flashlatte.ops.topk.hopper.digits import clear_bins, count_digits, settle_digit
from flashlatte.ops.topk.hopper.memory import BINS, SCRATCH
from flashlatte.ops.topk.order import load_values, ordered, store_chosen

# Neighbouring entries of a sample: what a cache line holds.
RUN = tl.constexpr(32)
# The key of -inf: the least that is a number's.
NEGATIVE_INFINITY = tl.constexpr(-(2**31) + 0x7FFFFF)
# Of a bin that is near the largest: 1,023 of them are four powers of two.
NEAR_BITS = tl.constexpr(15)
# As many as there are.
ALL = tl.constexpr(2**31 - 1)


@triton.jit
def entries_of_sample(length, wanted):
    """How many entries of a row to sample for a rank that about ``wanted`` reach.

    A rank r in a sample is off by √r: the sample is so large that the rank is 256 or more, a sixteenth.
    """
    return tl.minimum(tl.maximum(256 * (length // wanted + 1), 4096), 16384)


@triton.jit
def suggested_threshold(entries, length, wanted, sample, memory, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """A key, int64 and at least that of -inf, that about ``wanted`` entries of a row should reach; ``sample``: how many
    of them are looked at.
    """
    sample = tl.minimum(tl.cdiv(sample, RUN), length // RUN) * RUN
    spread = length // (sample // RUN)
    rank = (wanted.to(tl.int64) * sample // length).to(tl.int32) + 1
    low, bits, among, inside = near_largest(entries, sample, spread, rank, memory, BLOCK, INTERPRETED)
    low, _, _ = kth_largest(
        entries, sample, spread, low, bits, among, inside, rank // 16, memory, 10, BLOCK, INTERPRETED
    )
    return tl.maximum(low, NEGATIVE_INFINITY)


@triton.jit
def near_largest(entries, count, spread, k, memory, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Where the k-th largest key of a sample is, as ``kth_largest`` narrows it down: within four powers of two of the
    largest, where it nearly always is, one count says that to a hundredth.
    """
    highest = tl.full([BLOCK], -(2**31), tl.int32)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, ordered(_entries_at(entries, place, count, spread, INTERPRETED), place < count))
    top = tl.max(highest, axis=0)
    clear_bins(memory, 10, INTERPRETED)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        there = place < count
        keys = ordered(_entries_at(entries, place, count, spread, INTERPRETED), there)
        distance = (top - keys).to(tl.uint32, bitcast=True) >> NEAR_BITS
        # The last bin has what is further away, too.
        shared_words.count(memory, BINS + tl.minimum(distance, 1023).to(tl.int32), there, INTERPRETED)
    position, above, inside = shared_ranks.bin_of_rank(memory, BINS, SCRATCH, k, 1024, INTERPRETED)
    near = position < 1023
    low = tl.where(near, top.to(tl.int64) - ((position.to(tl.int64) + 1) << NEAR_BITS) + 1, -(2**31))
    return low, tl.where(near, NEAR_BITS, 32), tl.where(near, k - above, k), tl.where(near, inside, count + 1)


@triton.jit
def kth_largest(
    entries,
    count,
    spread,
    low,
    bits,
    wanted,
    inside,
    enough,
    memory,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The ``wanted``-th largest of those keys of ``count`` entries of a row that are less than 2^bits above ``low``
    (int64): there are ``inside``. The entries are runs of RUN neighbours that begin at every ``spread``.

    Stops at a key that at most ``enough`` entries more than wanted reach. Returns it, and of what reaches it how many
    are wanted, and how many there are.
    """
    while (bits > 0) & (inside > wanted + enough):
        clear_bins(memory, DIGIT, INTERPRETED)
        place = tl.arange(0, BLOCK)
        values = _entries_at(entries, place, count, spread, INTERPRETED)
        for _ in range(0, count, BLOCK):
            there = place < count
            keys = ordered(values, there)
            # The next block is on its way while this one is counted.
            place += BLOCK
            values = _entries_at(entries, place, count, spread, INTERPRETED)
            count_digits(keys, there, low, bits, memory, DIGIT, INTERPRETED)
        low, bits, wanted, inside = settle_digit(low, bits, wanted, memory, DIGIT, INTERPRETED)
    return low, wanted, inside


@triton.jit
def _entries_at(entries, place, count, spread, INTERPRETED: tl.constexpr):
    column = (place // RUN) * spread + place % RUN
    return load_values(entries + column, place < count, INTERPRETED)


@triton.jit
def store_largest_of_row(
    entries, index_row, value_row, length, k, memory, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The k largest of a row of more than k entries, whatever they are."""
    low = tl.full([], -(2**31), tl.int64)
    bits = tl.full([], 32, tl.int32)
    low, ties, inside = kth_largest(entries, length, RUN, low, bits, k, length, 0, memory, 11, BLOCK, INTERPRETED)
    least = low.to(tl.int32)
    ties = tl.where(inside == ties, ALL, ties)
    above_before = tl.zeros([], tl.int32)
    ties_before = tl.zeros([], tl.int32)
    for block in range(0, length, BLOCK):
        column = block + tl.arange(0, BLOCK)
        there = column < length
        keys = ordered(load_values(entries + column, there, INTERPRETED), there)
        above = (there & (keys > least)).to(tl.int32)
        tied = (there & (keys == least)).to(tl.int32)
        above_upto = above_before + tl.cumsum(above, axis=0)
        ties_upto = ties_before + tl.cumsum(tied, axis=0)
        chosen = (above == 1) | ((tied == 1) & (ties_upto <= ties))
        place = above_upto - above + tl.minimum(ties_upto - tied, ties)
        store_chosen(entries, index_row, value_row, chosen, place, column, INTERPRETED)
        above_before = tl.max(above_upto, axis=0)
        ties_before = tl.max(ties_upto, axis=0)
