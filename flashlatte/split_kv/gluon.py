"""``device.find_range`` for Gluon kernels, in 32-bit sums, and for blocks that a CTA takes several at a time; and the
partial outputs of absorbed MLA.

The cut is that of ``device``; only what scans vectors of lengths is written again, since Gluon wants a layout where
Triton infers one. All costs together must fit 32 bits (``plan.MAX_COST``), which are half as long to sum.
GRANULARITY is how many blocks a CTA takes at a time: a work item's blocks are rounded up to it.
"""

# Triton's calls are not Python's.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import LATENT, ROWS
from flashlatte.split_kv import device
from flashlatte.split_kv.plan import Partial

# What a CTA leaves that has not all of a work item, and how many numbers that are.
MLA_PARTIAL = Partial(ROWS.value, LATENT.value)
PARTIAL = gl.constexpr(MLA_PARTIAL.numbers)

# Work items that are looked at together.
_ITEMS = gl.constexpr(128)


class Equals(NamedTuple):
    """How ranges are cut where all work items are equally long.

    Attributes:
        ranges_of_equals: so many get work.
        free_of_equals: what of the overhead starting on a work item does not cost: all where each has as many of these
            ranges, so that they divide evenly, else nothing.
    """

    ranges_of_equals: Any
    free_of_equals: Any


def equals_of(ranges: int, items: int, overhead: int) -> Equals:
    return Equals(ranges, overhead if ranges % items == 0 else 0)


@gluon.constexpr_function
def _in_each_warp(WARPS):
    """_ITEMS for each warp, which then waits for no other."""
    return gl.BlockedLayout([_ITEMS.value // 32], [32], [WARPS], [0])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def round_up(blocks, GRANULARITY: gl.constexpr):
    return (blocks + GRANULARITY - 1) // GRANULARITY * GRANULARITY


@gluon.jit
def _item_costs(items, key_lengths, BLOCK_N: gl.constexpr, overhead, GRANULARITY: gl.constexpr):
    blocks = round_up(device.item_blocks(items, key_lengths, BLOCK_N), GRANULARITY)
    return gl.where(items < key_lengths.num_items, blocks + overhead, 0)


@gluon.jit
def _cost_of_first(items, costs):
    """What work item 0 costs; 0 where it is not among ``items``."""
    return gl.sum(gl.where(items == 0, costs, 0), 0)


@gluon.jit
def _are_equal(cost_of_first, total, key_lengths):
    """Whether all work items, which cost ``total``, cost as much as the first one, or so on average: that is enough, as
    any ranges and any overhead are right."""
    return cost_of_first * key_lengths.num_items == total


@gluon.jit
def _ranges_in_use(num_ranges, total, LEAST: gl.constexpr):
    """As many as there are, and no more than leaves each LEAST."""
    return gl.minimum(num_ranges, gl.maximum(total // LEAST, 1))


@gluon.jit
def _quotient(a, b):
    """⌊a / b⌋ of non-negative numbers of 32 bits: as signed ones they would take twice as many instructions."""
    return (gl.to_tensor(a).to(gl.uint32) // gl.to_tensor(b).to(gl.uint32)).to(gl.int32)


@gluon.jit
def _cut(total, number, ranges, GRANULARITY: gl.constexpr):
    """⌊number · total / ranges⌋ in whole granules, for number ≤ ranges, where the product may be too large."""
    granules = _quotient(total, GRANULARITY)
    whole = _quotient(granules, ranges)
    return (number * whole + _quotient(number * (granules - whole * ranges), ranges)) * GRANULARITY


@gluon.jit
def find_range(
    number,
    num_ranges,
    key_lengths,
    BLOCK_N: gl.constexpr,
    OVERHEAD: gl.constexpr,
    GRANULARITY: gl.constexpr = 1,
    equals=None,
):
    """The ``device.Range`` that is number ``number`` of ``num_ranges``, found by every warp for itself.

    Ranges without work are the first ones. Given ``equals`` (``Equals``), a range may be spent on starting alone.
    """
    gl.static_assert(OVERHEAD % GRANULARITY == 0, "starting on a work item costs whole granules")
    items = gl.arange(0, _ITEMS, _in_each_warp(gl.num_warps()))
    costs = _item_costs(items, key_lengths, BLOCK_N, OVERHEAD, GRANULARITY)
    total = gl.sum(costs, 0)
    cost_of_first = _cost_of_first(items, costs)
    for start in range(_ITEMS, key_lengths.num_items, _ITEMS):
        total += gl.sum(_item_costs(start + items, key_lengths, BLOCK_N, OVERHEAD, GRANULARITY), 0)
    if equals is None:
        free = gl.to_tensor(0)
        in_use = _ranges_in_use(num_ranges, total, OVERHEAD + GRANULARITY)
    else:
        are_equal = _are_equal(cost_of_first, total, key_lengths)
        free = gl.where(are_equal, equals.free_of_equals, 0)
        total -= free * key_lengths.num_items
        in_use = _ranges_in_use(gl.where(are_equal, equals.ranges_of_equals, num_ranges), total, GRANULARITY)
    first_in_use = num_ranges - in_use
    begin = _cut(total, gl.maximum(number - first_in_use, 0), in_use, GRANULARITY)
    end = _cut(total, gl.maximum(number + 1 - first_in_use, 0), in_use, GRANULARITY)

    first, stop, first_cost = _count(items, 0, costs, free, key_lengths, begin, end)
    scanned = gl.to_tensor(0)
    for start in range(_ITEMS, key_lengths.num_items, _ITEMS):
        scanned += gl.sum(costs, 0)
        costs = _item_costs(start + items, key_lengths, BLOCK_N, OVERHEAD, GRANULARITY)
        before, begun, cost_before = _count(start + items, scanned, costs, free, key_lengths, begin, end)
        first += before
        stop += begun
        first_cost += cost_before
    # Costs as they are where starting is not free.
    begin += free * (first + gl.where(begin > first_cost - free * first, 1, 0))
    end += free * stop
    return device.Range(begin, end, first, stop, first_cost)


@gluon.jit
def ranges_of_item(item, equals, key_lengths, BLOCK_N: gl.constexpr, OVERHEAD: gl.constexpr):
    """The first of ``find_range``'s ranges that has blocks of a work item, and how many consecutive ranges have.

    Of ranges that are as many as ``equals`` has, and without granularity; found by every warp for itself. All costs
    together, times one more than there are ranges, must fit 32 bits: a division of 64 takes as long as all of the rest.
    """
    items = gl.arange(0, _ITEMS, _in_each_warp(gl.num_warps()))
    total = gl.to_tensor(0)
    before = gl.to_tensor(0)
    cost_of_first = gl.to_tensor(0)
    for start in range(0, key_lengths.num_items, _ITEMS):
        costs = _item_costs(start + items, key_lengths, BLOCK_N, OVERHEAD, 1)
        total += gl.sum(costs, 0)
        before += gl.sum(gl.where(start + items < item, costs, 0), 0)
        cost_of_first += _cost_of_first(start + items, costs)
    free = gl.where(_are_equal(cost_of_first, total, key_lengths), equals.free_of_equals, 0)
    total -= free * key_lengths.num_items
    num_ranges = equals.ranges_of_equals
    in_use = _ranges_in_use(num_ranges, total, 1)
    begin = before - free * item + OVERHEAD - free
    first = range_with(begin, total, in_use)
    last = range_with(begin + device.item_blocks(item, key_lengths, BLOCK_N) - 1, total, in_use)
    return num_ranges - in_use + first, last - first + 1


@gluon.jit
def range_with(cost, total, ranges):
    """The range that has ``cost``: the last one that begins no later.

    Range r begins at ⌊r · total / ranges⌋, which is at most ``cost`` where r < (cost + 1) · ranges / total.
    """
    return ((cost + 1) * ranges + total - 1) // total - 1


@gluon.jit
def _count(items, scanned, costs, free, key_lengths, begin, end):
    """Of the work items, how many end before ``begin``, how many begin before ``end``, and what the former cost.

    For ``begin`` and ``end`` each costs ``free`` less: taken off after the scan, which then need not wait to know it.
    """
    item_end = scanned + gl.associative_scan(costs, 0, _add) - free * items
    is_before = (items < key_lengths.num_items) & (item_end - free <= begin)
    is_begun = (items < key_lengths.num_items) & (item_end - costs < end)
    cost_before = gl.sum(gl.where(is_before, costs, 0), 0)
    return gl.sum(is_before.to(gl.int32), 0), gl.sum(is_begun.to(gl.int32), 0), cost_before


@gluon.jit
def write_partial(partial, row, in_use, values, lse2, FIRST_COL: gl.constexpr):
    """Write normalised ``values`` [rows, columns] of ``row`` [rows] from FIRST_COL on as a partial output, as
    ``combine.write_partial`` does; the columns from 0 bring the base-2 ``lse2`` [rows] along."""
    col = FIRST_COL + gl.arange(0, values.shape[1], gl.SliceLayout(0, values.type.layout))
    gl.store(partial + (row * LATENT)[:, None] + col[None, :], values, mask=in_use[:, None])
    if FIRST_COL == 0:
        gl.store(partial + ROWS * LATENT + row, lse2, mask=in_use)
