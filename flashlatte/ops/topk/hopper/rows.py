"""The k-th largest entry of a row that is read from global memory once for each digit."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.ops.topk.hopper.digits import clear_bins, count_digits, settle_digit
from flashlatte.ops.topk.order import load_values, ordered, store_chosen

# Neighbouring entries of a sample: what a cache line holds.
RUN = tl.constexpr(32)
# The key of -inf: the least that is a number's.
NEGATIVE_INFINITY = tl.constexpr(-(2**31) + 0x7FFFFF)
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
    rank = (wanted.to(tl.int64) * sample // length).to(tl.int32) + 1
    low, _ = kth_largest(entries, sample, length // (sample // RUN), rank, rank // 16, memory, 10, BLOCK, INTERPRETED)
    return tl.maximum(low, NEGATIVE_INFINITY)


@triton.jit
def kth_largest(
    entries,
    count,
    spread,
    k,
    enough,
    memory,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The k-th largest key of ``count`` entries of a row, runs of RUN neighbours that begin at every ``spread``.

    Stops at a key that at most ``enough`` entries more than k reach.

    Returns:
        low (int64): the k-th largest key, or a lower one that as few reach.
        ties: how many of those that equal it are among the k largest: ALL if nobody else reaches it.
    """
    low = tl.full([], -(2**31), tl.int64)
    bits = tl.full([], 32, tl.int32)
    wanted = k
    inside = k + enough + 1
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
    return low, tl.where(inside == wanted, ALL, wanted)


@triton.jit
def _entries_at(entries, place, count, spread, INTERPRETED: tl.constexpr):
    column = (place // RUN) * spread + place % RUN
    return load_values(entries + column, place < count, INTERPRETED)


@triton.jit
def store_largest_of_row(
    entries, index_row, value_row, length, k, memory, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The k largest of a row of more than k entries, whatever they are."""
    least, ties = kth_largest(entries, length, RUN, k, 0, memory, 11, BLOCK, INTERPRETED)
    least = least.to(tl.int32)
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
