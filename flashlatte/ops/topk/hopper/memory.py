"""What a program's shared memory holds, in words."""

from __future__ import annotations

import triton
import triton.language as tl

# Bins that count the keys of each digit.
BINS = tl.constexpr(0)
# Once digits are counted: a bitmap of so many columns, and how many bits of it are set before each pair of words.
SEGMENT = tl.constexpr(65536)
BITMAP = tl.constexpr(0)
BITMAP_WORDS = tl.constexpr(2048)
BEFORE = tl.constexpr(2048)
# How many entries the list has.
COUNTER = tl.constexpr(3072)
# What warps tell each other (``shared_ranks``).
SCRATCH = tl.constexpr(3076)
# The list: pairs of a value's bits and its column.
LIST = tl.constexpr(3108)


@triton.constexpr_function
def words(CAPACITY):
    """Of a program whose list holds CAPACITY entries."""
    return LIST.value + 2 * int(CAPACITY)
