"""Entries of a row that reach a threshold, listed in shared memory with their columns, and the k largest of them."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_words
from flashlatte.kernels.triton.fp8 import widen
from flashlatte.ops.topk.hopper.digits import clear_bins, count_digits, settle_digit
from flashlatte.ops.topk.hopper.memory import BEFORE, BITMAP, BITMAP_PAIRS, COUNTER, LIST, SEGMENT
from flashlatte.ops.topk.order import ordered


@triton.jit
def list_reaching(
    logits,
    first,
    begin,
    stop,
    threshold,
    memory,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_CLUSTER: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """List the entries >= ``threshold`` from column ``begin`` to ``stop`` of a row that begins at element ``first`` of
    ``logits``, and count them; NaN is none of them.
    """
    # Whole blocks, from the first element on whose address is a multiple of 16 bytes (where that of ``logits`` is), are
    # loaded 16 bytes at a time.
    VECTOR: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
    first += begin
    length = stop - begin
    aligned = (first + VECTOR - 1) // VECTOR * VECTOR
    head = tl.minimum((aligned - first).to(tl.int32), length)
    blocks = (length - head) // BLOCK
    if blocks > 0:
        place = tl.arange(0, BLOCK)
        loaded = tl.load(logits + aligned + place)
        for block in range(blocks):
            values = widen(loaded, INTERPRETED)
            # The next block is on its way while this one is listed; the last one once more, rather than what follows.
            loaded = tl.load(logits + aligned + tl.minimum(block + 1, blocks - 1).to(tl.int64) * BLOCK + place)
            column = begin + head + block * BLOCK + place
            shared_words.append_reaching(
                memory, COUNTER, LIST, values, column, threshold, CAPACITY, IN_CLUSTER, INTERPRETED
            )

    rest = length - blocks * BLOCK
    for rest_begin in range(0, rest, BLOCK):
        place = rest_begin + tl.arange(0, BLOCK)
        column = tl.where(place < head, place, place + blocks * BLOCK)
        values = widen(tl.load(logits + first + column, mask=place < rest, other=float("nan")), INTERPRETED)
        shared_words.append_reaching(
            memory, COUNTER, LIST, values, begin + column, threshold, CAPACITY, IN_CLUSTER, INTERPRETED
        )


@triton.jit
def _listed(begin, count, memory, GROUP: tl.constexpr, INTERPRETED: tl.constexpr):
    """Entries of the list from ``begin`` on: keys [GROUP], their columns, and which of them there are."""
    place = begin + tl.arange(0, GROUP)
    there = place < count
    bits, column = shared_words.load_two(memory, LIST + 2 * place, there, INTERPRETED)
    return ordered(bits.to(tl.float32, bitcast=True), there), column, there


@triton.jit
def store_largest_of_list(
    index_row, value_row, count, low, length, k, memory, GROUP: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The k largest of ``count`` >= k listed entries of a row, whose keys reach ``low`` (int64)."""
    highest = tl.full([GROUP], -(2**31), tl.int32)
    for begin in range(0, count, GROUP):
        keys, _, _ = _listed(begin, count, memory, GROUP, INTERPRETED)
        highest = tl.maximum(highest, keys)
    bits = shared_words.bits_of((tl.max(highest, axis=0).to(tl.int64) - low).to(tl.int32), INTERPRETED)
    low, wanted, inside = _kth_largest(low, bits, k, count, 0, False, memory, GROUP, INTERPRETED)
    least = low.to(tl.int32)
    last_tie = length
    if inside != wanted:
        # The first columns of the entries that equal the k-th, found as the largest of -column.
        bits = shared_words.bits_of(length, INTERPRETED)
        low, _, _ = _kth_largest(-length.to(tl.int64), bits, wanted, count, least, True, memory, GROUP, INTERPRETED)
        last_tie = -low.to(tl.int32)
    _store_in_order(index_row, value_row, count, least, last_tie, length, memory, GROUP, INTERPRETED)


@triton.jit
def _kth_largest(
    low, bits, k, count, least, BY_COLUMN: tl.constexpr, memory, GROUP: tl.constexpr, INTERPRETED: tl.constexpr
):
    """A key from ``low`` to ``low + 2^bits - 1`` that exactly k listed keys reach, or the k-th largest if none is.

    BY_COLUMN: of -column of those entries whose key is ``least``.

    Returns the key, and of the keys that nothing tells from it how many are among the k largest, and how many there
    are.
    """
    wanted = k
    inside = k + 1
    while (bits > 0) & (inside != wanted):
        clear_bins(memory, 10, INTERPRETED)
        for begin in range(0, count, GROUP):
            keys, column, there = _listed(begin, count, memory, GROUP, INTERPRETED)
            if BY_COLUMN:
                count_digits(-column, there & (keys == least), low, bits, memory, 10, INTERPRETED)
            else:
                count_digits(keys, there, low, bits, memory, 10, INTERPRETED)
        low, bits, wanted, inside = settle_digit(low, bits, wanted, memory, 10, INTERPRETED)
    return low, wanted, inside


@triton.jit
def _store_in_order(
    index_row,
    value_row,
    count,
    least,
    last_tie,
    length,
    memory,
    GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store the listed entries above ``least``, and those that equal it up to column ``last_tie``, by their columns.

    How many of them come before one of them is read from a bitmap of the row, a segment at a time.
    """
    before = tl.zeros([], tl.int32)
    pair = tl.arange(0, BITMAP_PAIRS)
    zero = tl.zeros_like(pair)
    for segment in range(0, length, SEGMENT):
        shared_words.store_two(memory, BITMAP + 2 * pair, zero, zero, pair >= 0, INTERPRETED)
        tl.debug_barrier()
        for begin in range(0, count, GROUP):
            keys, column, there = _listed(begin, count, memory, GROUP, INTERPRETED)
            offset = column - segment
            chosen = _chosen(keys, column, there, least, last_tie, offset)
            bit = tl.full([GROUP], 1, tl.int32) << (offset & 31)
            shared_words.set_bits(memory, BITMAP + (offset >> 5), bit, chosen, INTERPRETED)
        tl.debug_barrier()
        first, second = shared_words.load_two(memory, BITMAP + 2 * pair, pair >= 0, INTERPRETED)
        ones = shared_words.ones_in(first, INTERPRETED) + shared_words.ones_in(second, INTERPRETED)
        upto = before + tl.cumsum(ones, axis=0)
        shared_words.store(memory, BEFORE + pair, upto - ones, pair >= 0, INTERPRETED)
        before = tl.max(upto, axis=0)
        tl.debug_barrier()
        for begin in range(0, count, GROUP):
            keys, column, there = _listed(begin, count, memory, GROUP, INTERPRETED)
            offset = column - segment
            chosen = _chosen(keys, column, there, least, last_tie, offset)
            lower, upper = shared_words.load_two(memory, BITMAP + 2 * (offset >> 6), chosen, INTERPRETED)
            below = (tl.full([GROUP], 1, tl.int32) << (offset & 31)) - 1
            in_upper = (offset & 32) != 0
            rank = shared_words.load(memory, BEFORE + (offset >> 6), chosen, INTERPRETED)
            rank += shared_words.ones_in(tl.where(in_upper, lower, lower & below), INTERPRETED)
            rank += shared_words.ones_in(tl.where(in_upper, upper & below, 0), INTERPRETED)
            tl.store(index_row + rank, column, mask=chosen)
            if value_row is not None:
                value, _ = shared_words.load_two(memory, LIST + 2 * (begin + tl.arange(0, GROUP)), chosen, INTERPRETED)
                tl.store(value_row + rank, value.to(tl.float32, bitcast=True), mask=chosen)
        tl.debug_barrier()


@triton.jit
def _chosen(keys, column, there, least, last_tie, offset):
    """Which listed entries are among the k largest, and in the segment that ``offset`` counts from."""
    largest = (keys > least) | ((keys == least) & (column <= last_tie))
    return there & largest & (offset >= 0) & (offset < SEGMENT)
