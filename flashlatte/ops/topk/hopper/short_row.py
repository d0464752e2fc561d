"""Select the k largest of a row whose keys all fit in the registers of one CTA, without a sample and a list."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_scan, shared_words
from flashlatte.ops.topk.hopper.shared_layout import BEFORE, BITMAP, BITMAP_WORDS, LIST, SCRATCH
from flashlatte.ops.topk.hopper.store_largest import select_largest, store_staged
from flashlatte.ops.topk.order import HIGHEST, load_values, ordered

# Maximum length of a short row: its bitmap has a byte per column.
SHORT_ROW = tl.constexpr(4 * BITMAP_WORDS.value)
# Rows up to this length take half as many registers and instructions.
PART = tl.constexpr(SHORT_ROW.value // 2)


@triton.jit
def store_largest_of_short_row(entries, results, length, k, memory, BLOCK: tl.constexpr, CAPACITY: tl.constexpr):
    """Store the k largest entries, in ascending order of their columns, of a row with more than k and at most BLOCK
    entries. BLOCK is PART or SHORT_ROW; CAPACITY is at least 2 k.
    """
    # With the shape of a long row's block, Triton would choose the layout of that block's aligned loads, with four
    # columns per thread, and load one column at a time in it.
    column = tl.arange(0, BLOCK // PART)[:, None] * PART + tl.arange(0, PART)[None, :]  # [BLOCK / PART, PART]
    valid = column < length
    values = load_values(entries + column, valid)
    keys = ordered(values, valid)
    low = tl.min(tl.where(valid, keys, HIGHEST)).to(tl.int64)
    selected = select_largest(keys, column, valid, low, length, k, memory, 11)
    # Neighboring columns are in neighboring threads. Bits would need atomic operations on the same word; bytes do not.
    shared_words.store_bytes(memory, BITMAP, column, selected)
    WORDS: tl.constexpr = BLOCK // 4
    shared_scan.popcount_prefix_sums(memory, BITMAP, BEFORE, SCRATCH, tl.zeros([], tl.int32), WORDS)
    rank = shared_words.count_bits_before(memory, BITMAP, BEFORE, 8 * column, selected)
    # Stage the results in shared memory, so that neighboring threads store neighboring entries.
    shared_words.store(memory, LIST + rank, column, selected)
    if results.top_values is not None:
        shared_words.store(memory, LIST + CAPACITY + rank, values.to(tl.int32, bitcast=True), selected)
    tl.debug_barrier()
    position = tl.arange(0, CAPACITY // 2)
    stored = position < k
    store_staged(results, position, stored, memory)
    if results.top_values is not None:
        bits = shared_words.load(memory, LIST + CAPACITY + position, stored)
        tl.store(results.top_values + position, bits.to(tl.float32, bitcast=True), mask=stored)
