"""The k largest of a row: of its candidates if they will do, else of the row itself."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import widen
from flashlatte.ops.topk.portable.order import OUTSIDE, load_keys, row_range, threshold
from flashlatte.runtime.triton_kernel import kernel

DIGITS = tl.constexpr(256)


@kernel
def finish_kernel(
    logits,
    start,
    end,
    candidate_keys,
    candidate_columns,
    counts,
    indices,
    values,
    first_row: tl.int64,
    width: tl.int64,
    chunks: tl.int32,
    k: tl.int32,
    next_n: tl.int32,
    logits_stride: tl.int64,
    start_stride: tl.int64,
    end_stride: tl.int64,
    index_stride: tl.int64,
    value_stride: tl.int64,
    PER_REQUEST: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Without candidates (None) rows have at most PLACES entries, which are taken as they are."""
    program = tl.program_id(0).to(tl.int64)
    row = first_row + program
    first, last = row_range(start, end, row, width, start_stride, end_stride, next_n, PER_REQUEST)
    length = last - first
    entries = logits + row * logits_stride + first
    index_row = indices + row * index_stride
    value_row = values
    if values is not None:
        value_row = values + row * value_stride

    place = tl.arange(0, PLACES)
    if length <= k:
        store_all(entries, index_row, value_row, place, length, k, INTERPRETED)
    elif candidate_keys is None:
        keys = load_keys(entries + place, place < length, INTERPRETED)
        store_largest(entries, index_row, value_row, keys, place, k, INTERPRETED)
    else:
        total = tl.zeros([], tl.int32)
        fits = tl.zeros([], tl.int32) + 1
        # [PLACES]: where the candidates of all chunks, one behind the other, lie
        source = tl.zeros([PLACES], tl.int64)
        for chunk in range(chunks):
            count = tl.load(counts + program * chunks + chunk)
            base = (program * chunks + chunk) * PLACES
            source = tl.where((place >= total) & (place < total + count), base + place - total, source)
            fits = fits & (count <= PLACES).to(tl.int32)
            # Many chunks of many candidates must not pass 2^31.
            total = tl.minimum(total + tl.minimum(count, PLACES + 1), PLACES + 1)
        if (fits == 1) & (total >= k) & (total <= PLACES):
            taken = place < total
            keys = tl.load(candidate_keys + source, mask=taken, other=OUTSIDE)
            columns = tl.load(candidate_columns + source, mask=taken, other=0)
            store_largest(entries, index_row, value_row, keys, columns, k, INTERPRETED)
        else:
            store_largest_by_radix(entries, index_row, value_row, length, k, BLOCK, INTERPRETED)


@triton.jit
def store_all(entries, index_row, value_row, place, length, k, INTERPRETED: tl.constexpr):
    """All ``length`` <= k entries, and padding behind them."""
    inside = place < length
    tl.store(index_row + place, tl.where(inside, place, -1), mask=place < k)
    if value_row is not None:
        value = widen(tl.load(entries + place, mask=inside, other=0.0), INTERPRETED)
        tl.store(value_row + place, tl.where(inside, value, float("-inf")), mask=place < k)


@triton.jit
def store_chosen(entries, index_row, value_row, chosen, place, columns, INTERPRETED: tl.constexpr):
    tl.store(index_row + place, columns.to(tl.int32), mask=chosen)
    if value_row is not None:
        value = widen(tl.load(entries + columns, mask=chosen, other=0.0), INTERPRETED)
        tl.store(value_row + place, value, mask=chosen)


@triton.jit
def store_largest(entries, index_row, value_row, keys, columns, k, INTERPRETED: tl.constexpr):
    """The k largest of more than k keys, whose columns ascend."""
    least = threshold(keys, k)
    above = (keys > least).to(tl.int32)
    ties = (keys == least).to(tl.int32)
    ties_taken = k - tl.sum(above, axis=0)
    # Both counts in one sum: neither reaches 2^15.
    both = (above << 16) | ties
    before = tl.cumsum(both, axis=0) - both
    above_before, ties_before = before >> 16, before & 0xFFFF
    chosen = (above == 1) | ((ties == 1) & (ties_before < ties_taken))
    place = above_before + tl.minimum(ties_before, ties_taken)
    store_chosen(entries, index_row, value_row, chosen, place, columns, INTERPRETED)


@triton.jit
def store_largest_by_radix(entries, index_row, value_row, length, k, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """The k largest of ``length`` > k entries, read once for every eight bits of their keys and once to choose."""
    settled = tl.zeros([], tl.int64)
    wanted = k
    digit = tl.arange(0, DIGITS)
    for step in range(4):
        shift = 24 - 8 * step
        histogram = tl.zeros([DIGITS], tl.int32)
        for block in range(0, length, BLOCK):
            column = block + tl.arange(0, BLOCK)
            inside = column < length
            keys = load_keys(entries + column, inside, INTERPRETED)
            digits = (keys ^ OUTSIDE).to(tl.uint32, bitcast=True) >> shift
            undecided = inside & ((digits >> 8) == settled.to(tl.uint32))
            histogram += tl.histogram((digits & 255).to(tl.int32), DIGITS, mask=undecided)
        # Entries of this digit or a higher one.
        reaching = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram
        chosen = tl.max(tl.where(reaching >= wanted, digit, 0), axis=0)
        wanted -= tl.sum(tl.where(digit == chosen, reaching - histogram, 0), axis=0)
        settled = settled * 256 + chosen
    least = (settled - 0x80000000).to(tl.int32)

    # ``wanted`` of the entries that equal the k-th are taken, the first ones.
    above_before = tl.zeros([], tl.int32)
    ties_before = tl.zeros([], tl.int32)
    for block in range(0, length, BLOCK):
        column = block + tl.arange(0, BLOCK)
        keys = load_keys(entries + column, column < length, INTERPRETED)
        above = (keys > least).to(tl.int32)
        ties = (keys == least).to(tl.int32)
        above_ranks = above_before + tl.cumsum(above, axis=0) - above
        ties_ranks = ties_before + tl.cumsum(ties, axis=0) - ties
        chosen = (above == 1) | ((ties == 1) & (ties_ranks < wanted))
        place = above_ranks + tl.minimum(ties_ranks, wanted)
        store_chosen(entries, index_row, value_row, chosen, place, column, INTERPRETED)
        above_before += tl.sum(above, axis=0)
        ties_before += tl.sum(ties, axis=0)
