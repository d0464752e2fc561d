"""One pass of a radix select: a histogram of a digit of the keys in shared memory, and the digit of the key of a rank.

The state of the search: the result is the ``rank``-th largest of the keys from ``low`` to ``low + 2^bits - 1``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_scan, shared_words
from flashlatte.ops.topk.hopper.shared_layout import BINS, SCRATCH


@triton.jit
def clear_bins(memory, DIGIT: tl.constexpr):
    """Clear the histogram of a digit of DIGIT bits."""
    bin = tl.arange(0, 1 << DIGIT)
    shared_words.store(memory, BINS + bin, tl.zeros_like(bin), bin >= 0)
    tl.debug_barrier()


@triton.jit
def count_digits(keys, valid, low, bits, memory, DIGIT: tl.constexpr):
    """Add the highest digits of the keys in ``low`` to ``low + 2^bits - 1`` to the histogram; bins are in descending
    order."""
    shift = tl.maximum(bits - DIGIT, 0)
    distance = (keys - low.to(tl.int32)).to(tl.uint32, bitcast=True)
    digit = distance >> shift.to(tl.uint32)
    last = (1 << (bits - shift)) - 1
    undecided = valid & (digit <= last.to(tl.uint32))
    shared_words.count(memory, BINS + last - digit.to(tl.int32), undecided)


@triton.jit
def resolve_digit(low, bits, rank, memory, DIGIT: tl.constexpr):
    """Find the digit of the rank-th largest of the counted keys.

    Returns the new ``low``, ``bits`` and ``rank`` for the keys with that digit, and their number.
    """
    position, above, inside = shared_scan.find_bin_of_rank(memory, BINS, SCRATCH, rank, 1 << DIGIT)
    shift = tl.maximum(bits - DIGIT, 0)
    digit = (1 << (bits - shift)) - 1 - position
    return low + (digit.to(tl.int64) << shift), shift, rank - above, inside
