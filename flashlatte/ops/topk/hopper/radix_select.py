"""Radix select on a row in global memory, which is read once per digit; and the threshold estimate from a sample."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_scan, shared_words
from flashlatte.ops.topk.hopper.digits import clear_bins, count_digits, resolve_digit
from flashlatte.ops.topk.hopper.shared_layout import BINS, SCRATCH
from flashlatte.ops.topk.order import load_values, ordered
from flashlatte.ops.topk.outputs import store_reaching

# Adjacent entries of a sample: a cache line.
RUN = tl.constexpr(32)
# The key of -inf, the smallest key of a value other than NaN.
NEGATIVE_INFINITY = tl.constexpr(-(2**31) + 0x7FFFFF)
# Bits of a bin near the largest key: 1,023 bins cover four powers of two.
NEAR_BITS = tl.constexpr(15)
# No limit on the number of ties.
NO_LIMIT = tl.constexpr(2**31 - 1)


@triton.jit
def sample_size(length, target):
    """The sample size for estimating a threshold that about ``target`` entries reach.

    The standard deviation of rank r in a sample is √r: the sample is large enough that r >= 256, an error of 1/16.
    """
    return tl.minimum(tl.maximum(256 * (length // target + 1), 4096), 16384)


@triton.jit
def estimate_threshold(entries, length, target, sample, memory, BLOCK: tl.constexpr):
    """A key (int64, at least that of -inf) that about ``target`` entries of a row should reach. ``sample``: number of
    entries to sample.
    """
    sample = tl.minimum(tl.cdiv(sample, RUN), length // RUN) * RUN
    spread = length // (sample // RUN)
    rank = (target.to(tl.int64) * sample // length).to(tl.int32) + 1
    low, bits, among, inside = bracket_near_largest(entries, sample, spread, rank, memory, BLOCK)
    low, _, _ = kth_largest(entries, sample, spread, low, bits, among, inside, rank // 16, memory, 10, BLOCK)
    return tl.maximum(low, NEGATIVE_INFINITY)


@triton.jit
def bracket_near_largest(entries, count, spread, k, memory, BLOCK: tl.constexpr):
    """Narrow down the k-th largest key of a sample, as the initial state of ``kth_largest``. If it is within four
    powers of two of the largest key, which is nearly always the case, one histogram gives it to about 1%.
    """
    highest = tl.full([BLOCK], -(2**31), tl.int32)
    for begin in range(0, count, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, ordered(_entries_at(entries, position, count, spread), position < count))
    top = tl.max(highest, axis=0)
    clear_bins(memory, 10)
    for begin in range(0, count, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        valid = position < count
        keys = ordered(_entries_at(entries, position, count, spread), valid)
        distance = (top - keys).to(tl.uint32, bitcast=True) >> NEAR_BITS
        # The last bin also counts all keys that are further away.
        shared_words.count(memory, BINS + tl.minimum(distance, 1023).to(tl.int32), valid)
    bin, above, inside = shared_scan.find_bin_of_rank(memory, BINS, SCRATCH, k, 1024)
    near = bin < 1023
    low = tl.where(near, top.to(tl.int64) - ((bin.to(tl.int64) + 1) << NEAR_BITS) + 1, -(2**31))
    return low, tl.where(near, NEAR_BITS, 32), tl.where(near, k - above, k), tl.where(near, inside, count + 1)


@triton.jit
def kth_largest(
    entries, count, spread, low, bits, rank, inside, enough, memory, DIGIT: tl.constexpr, BLOCK: tl.constexpr
):
    """The ``rank``-th largest of the ``inside`` keys from ``low`` (int64) to ``low + 2^bits - 1``, of ``count``
    entries of a row. The entries are runs of RUN adjacent ones, one run every ``spread`` columns.

    Stops at a key that at most ``rank + enough`` entries reach. Returns it and, of the keys that are not
    distinguished from it, how many are to be selected, and how many exist.
    """
    while (bits > 0) & (inside > rank + enough):
        clear_bins(memory, DIGIT)
        position = tl.arange(0, BLOCK)
        values = _entries_at(entries, position, count, spread)
        for _ in range(0, count, BLOCK):
            valid = position < count
            keys = ordered(values, valid)
            # Prefetch the next block while this one is counted.
            position += BLOCK
            values = _entries_at(entries, position, count, spread)
            count_digits(keys, valid, low, bits, memory, DIGIT)
        low, bits, rank, inside = resolve_digit(low, bits, rank, memory, DIGIT)
    return low, rank, inside


@triton.jit
def _entries_at(entries, position, count, spread):
    column = (position // RUN) * spread + position % RUN
    return load_values(entries + column, position < count)


@triton.jit
def store_largest_of_row(entries, results, length, k, memory, BLOCK: tl.constexpr):
    """Store the k largest entries of a row with more than k entries, for any distribution of values."""
    low = tl.full([], -(2**31), tl.int64)
    bits = tl.full([], 32, tl.int32)
    low, ties, inside = kth_largest(entries, length, RUN, low, bits, k, length, 0, memory, 11, BLOCK)
    kth_key = low.to(tl.int32)
    ties = tl.where(inside == ties, NO_LIMIT, ties)
    store_reaching(entries, results, length, kth_key, ties, BLOCK)
