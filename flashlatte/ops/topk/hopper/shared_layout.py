"""Layout of a CTA's shared memory, in words."""

from __future__ import annotations

import triton
import triton.language as tl

# The histogram of a digit.
BINS = tl.constexpr(0)
# After the radix select: a bitmap of SEGMENT columns, and the number of set bits before each pair of words.
SEGMENT = tl.constexpr(65536)
BITMAP = tl.constexpr(0)
BITMAP_WORDS = tl.constexpr(2048)
BEFORE = tl.constexpr(2048)
# The number of candidates.
COUNTER = tl.constexpr(3072)
# Scratch of ``shared_scan``.
SCRATCH = tl.constexpr(3076)
# The candidates: pairs of value bits and column.
LIST = tl.constexpr(3108)


@triton.constexpr_function
def num_words(CAPACITY):
    """Words of a CTA with a list of CAPACITY candidates."""
    return LIST.value + 2 * int(CAPACITY)
