"""A key's rank among many, found a digit at a time: how many keys have each digit is counted in shared memory.

What is still to be found is the ``wanted``-th largest of the keys from ``low`` to ``low + 2^bits - 1``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_ranks, shared_words
from flashlatte.ops.topk.hopper.memory import BINS, SCRATCH


@triton.jit
def clear_bins(memory, DIGIT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Before the keys of a digit of DIGIT bits are counted."""
    place = tl.arange(0, 1 << DIGIT)
    shared_words.store(memory, BINS + place, tl.zeros_like(place), place >= 0, INTERPRETED)
    tl.debug_barrier()


@triton.jit
def count_digits(keys, there, low, bits, memory, DIGIT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Count the highest digit of those keys that are less than 2^bits above ``low``; the bins descend."""
    shift = tl.maximum(bits - DIGIT, 0)
    distance = (keys - low.to(tl.int32)).to(tl.uint32, bitcast=True)
    digit = distance >> shift.to(tl.uint32)
    last = (1 << (bits - shift)) - 1
    undecided = there & (digit <= last.to(tl.uint32))
    shared_words.count(memory, BINS + last - digit.to(tl.int32), undecided, INTERPRETED)


@triton.jit
def settle_digit(low, bits, wanted, memory, DIGIT: tl.constexpr, INTERPRETED: tl.constexpr):
    """The digit of the wanted-th largest of the keys that were counted.

    Returns ``low``, ``bits`` and ``wanted`` among the keys with that digit, and how many those are.
    """
    position, above, inside = shared_ranks.bin_of_rank(memory, BINS, SCRATCH, wanted, 1 << DIGIT, INTERPRETED)
    shift = tl.maximum(bits - DIGIT, 0)
    digit = (1 << (bits - shift)) - 1 - position
    return low + (digit.to(tl.int64) << shift), shift, wanted - above, inside
