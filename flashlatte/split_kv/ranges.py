"""The tile scheduler of split-KV: each CTA computes from the lengths which blocks of which work items it processes.

The cost of a work item is OVERHEAD blocks plus its number of blocks. The costs of all work items are concatenated. With
the total T, range r of R is the interval from ⌊r·T/R⌋ to ⌊(r+1)·T/R⌋, and one CTA of each group processes it. A CTA
shares at most its first work item with earlier ranges and its last one with later ranges. FlashMLA's
``get_mla_metadata`` computes the same partition in a separate kernel; here every CTA computes its own range, so
metadata of an earlier call cannot be stale.

The same functions serve Triton and Gluon kernels: what has a layout, the work items that a scan reads at a time, is an
argument. Sums are 32-bit, which takes half the time of 64 bits; ``plan.num_ranges`` limits the total cost accordingly.

GRANULARITY is the number of blocks that a CTA processes at a time. The blocks of a work item are rounded up to it.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.runtime.kernel_records import Int32
from flashlatte.split_kv.device import SCAN, item_blocks


class Range(NamedTuple):
    """Costs begin to end, in work items first to stop (exclusive); work item ``first`` starts at cost
    ``first_cost``."""

    begin: Any
    end: Any
    first: Any
    stop: Any
    first_cost: Any


class UniformRanges(NamedTuple):
    """The partition into ranges if all work items have the same length.

    Attributes:
        ranges: number of ranges with work.
        free: the part of the overhead that does not count as cost: all of it if the ranges divide evenly among
            the work items, otherwise 0.
    """

    ranges: Int32
    free: Int32


def uniform_ranges_of(ranges: int, items: int, overhead: int) -> UniformRanges:
    return UniformRanges(ranges, overhead if ranges % items == 0 else 0)


@triton.jit
def round_up(blocks, GRANULARITY: tl.constexpr):
    return (blocks + GRANULARITY - 1) // GRANULARITY * GRANULARITY


@triton.jit
def _item_costs(items, key_lengths, BLOCK_N: tl.constexpr, overhead, GRANULARITY: tl.constexpr):
    blocks = round_up(item_blocks(items, key_lengths, BLOCK_N), GRANULARITY)
    return tl.where(items < key_lengths.num_items, blocks + overhead, 0)


@triton.jit
def _cost_of_first(items, costs):
    """The cost of work item 0; 0 if it is not among ``items``."""
    return tl.sum(tl.where(items == 0, costs, 0), 0)


@triton.jit
def _are_uniform(cost_of_first, total, key_lengths):
    """Whether the average cost of the work items, with the sum ``total``, equals that of the first one. That is
    sufficient, because any ranges and any overhead give correct results."""
    return cost_of_first * key_lengths.num_items == total


@triton.jit
def _ranges_in_use(num_ranges, total, MIN_COST: tl.constexpr):
    """The number of ranges with work: all, but no more than leave each a cost of MIN_COST."""
    return tl.minimum(num_ranges, tl.maximum(total // MIN_COST, 1))


@triton.jit
def _quotient(a, b):
    """⌊a / b⌋ of non-negative 32-bit integers: a signed division takes twice as many instructions."""
    return (tl.cast(a, tl.uint32) // tl.cast(b, tl.uint32)).to(tl.int32)


@triton.jit
def _cut(total, number, ranges, GRANULARITY: tl.constexpr):
    """⌊number · total / ranges⌋ in whole granules, for number ≤ ranges, without overflow of the product."""
    granules = _quotient(total, GRANULARITY)
    whole = _quotient(granules, ranges)
    return (number * whole + _quotient(number * (granules - whole * ranges), ranges)) * GRANULARITY


@triton.jit
def find_range(
    number,
    num_ranges,
    key_lengths,
    BLOCK_N: tl.constexpr,
    OVERHEAD: tl.constexpr,
    GRANULARITY: tl.constexpr = 1,
    uniform=None,
    items=None,
):
    """``Range`` number ``number`` of ``num_ranges``. The first ranges are those without work: they have first = stop.

    Args:
        uniform: ``UniformRanges``, or None. With it, a range may consist of overhead only.
        items: the work items 0 … N - 1 that a scan reads at a time, in a Gluon kernel's layout. None: SCAN items, in a
            Triton kernel.
    """
    tl.static_assert(OVERHEAD % GRANULARITY == 0, "OVERHEAD must be a multiple of GRANULARITY")
    # In Triton kernels, a scan outside of a loop ends the analysis by which loads become vectors (3.7).
    KEEPS_FIRST: tl.constexpr = items is not None
    if items is None:
        items = tl.arange(0, SCAN)
    N: tl.constexpr = items.shape[0]
    costs = _item_costs(items, key_lengths, BLOCK_N, OVERHEAD, GRANULARITY)
    total = tl.sum(costs, 0)
    cost_of_first = _cost_of_first(items, costs)
    for start in range(N, key_lengths.num_items, N):
        total += tl.sum(_item_costs(start + items, key_lengths, BLOCK_N, OVERHEAD, GRANULARITY), 0)
    if uniform is None:
        free = tl.cast(0, tl.int32)
        in_use = _ranges_in_use(num_ranges, total, OVERHEAD + GRANULARITY)
    else:
        are_uniform = _are_uniform(cost_of_first, total, key_lengths)
        free = tl.where(are_uniform, uniform.free, 0)
        total -= free * key_lengths.num_items
        in_use = _ranges_in_use(tl.where(are_uniform, uniform.ranges, num_ranges), total, GRANULARITY)
    first_in_use = num_ranges - in_use
    begin = _cut(total, tl.maximum(number - first_in_use, 0), in_use, GRANULARITY)
    end = _cut(total, tl.maximum(number + 1 - first_in_use, 0), in_use, GRANULARITY)

    scanned = tl.cast(0, tl.int32)
    if KEEPS_FIRST:
        first, stop, first_cost = _count(items, 0, costs, free, key_lengths, begin, end)
    else:
        first, stop, first_cost = tl.cast(0, tl.int32), tl.cast(0, tl.int32), tl.cast(0, tl.int32)
        costs = tl.zeros_like(costs)
    for start in range(N if KEEPS_FIRST else 0, key_lengths.num_items, N):
        scanned += tl.sum(costs, 0)
        costs = _item_costs(start + items, key_lengths, BLOCK_N, OVERHEAD, GRANULARITY)
        before, begun, cost_before = _count(start + items, scanned, costs, free, key_lengths, begin, end)
        first += before
        stop += begun
        first_cost += cost_before
    # Convert back to costs that include the overhead.
    begin += free * (first + tl.where(begin > first_cost - free * first, 1, 0))
    end += free * stop
    return Range(begin, end, first, stop, first_cost)


@triton.jit
def _count(items, scanned, costs, free, key_lengths, begin, end):
    """The number of work items that end before ``begin``, the number that begin before ``end``, and the cost of the
    former.

    Relative to ``begin`` and ``end`` each work item costs ``free`` less; it is subtracted after the scan, so that the
    scan does not depend on it.
    """
    item_end = scanned + tl.cumsum(costs, 0) - free * items
    is_before = (items < key_lengths.num_items) & (item_end - free <= begin)
    is_begun = (items < key_lengths.num_items) & (item_end - costs < end)
    cost_before = tl.sum(tl.where(is_before, costs, 0), 0)
    return tl.sum(is_before.to(tl.int32), 0), tl.sum(is_begun.to(tl.int32), 0), cost_before


@triton.jit
def ranges_with_item(item, uniform, items, key_lengths, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr):
    """The first range of ``find_range`` with blocks of a work item, and the number of its consecutive ranges.

    For ``uniform.ranges`` ranges and granularity 1. The total cost times (number of ranges + 1) must fit 32 bits: a
    64-bit division takes as long as everything else.
    """
    N: tl.constexpr = items.shape[0]
    total = tl.cast(0, tl.int32)
    before = tl.cast(0, tl.int32)
    cost_of_first = tl.cast(0, tl.int32)
    for start in range(0, key_lengths.num_items, N):
        costs = _item_costs(start + items, key_lengths, BLOCK_N, OVERHEAD, 1)
        total += tl.sum(costs, 0)
        before += tl.sum(tl.where(start + items < item, costs, 0), 0)
        cost_of_first += _cost_of_first(start + items, costs)
    free = tl.where(_are_uniform(cost_of_first, total, key_lengths), uniform.free, 0)
    total -= free * key_lengths.num_items
    num_ranges = uniform.ranges
    in_use = _ranges_in_use(num_ranges, total, 1)
    begin = before - free * item + OVERHEAD - free
    first = range_containing(begin, total, in_use)
    last = range_containing(begin + item_blocks(item, key_lengths, BLOCK_N) - 1, total, in_use)
    return num_ranges - in_use + first, last - first + 1


@triton.jit
def range_containing(cost, total, ranges):
    """The range that contains ``cost``: the last one that begins at or before it.

    Range r begins at ⌊r · total / ranges⌋, which is at most ``cost`` where r < (cost + 1) · ranges / total.
    """
    return ((cost + 1) * ranges + total - 1) // total - 1


@triton.jit
def split_of(cta_range, item_cost, blocks, overhead):
    """Blocks begin to end (exclusive) of a range's split of the work item that starts at ``item_cost``.

    The split is empty if the range ends within the item's overhead.
    """
    item_begin = item_cost + overhead
    begin = tl.minimum(tl.maximum(cta_range.begin - item_begin, 0), blocks)
    end = tl.minimum(tl.maximum(cta_range.end - item_begin, 0), blocks)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def continued_item(cta_range, overhead):
    """The work item that a range continues, or -1."""
    continues = (cta_range.first < cta_range.stop) & (cta_range.begin > cta_range.first_cost + overhead)
    return tl.where(continues, cta_range.first, -1)
