"""``device.find_range`` for Gluon kernels, with 32-bit sums and a granularity of several blocks; and the partial
outputs of absorbed MLA.

The partition is that of ``device``. Only the scans over lengths are repeated here, because Gluon requires layouts that
Triton infers. The total cost must fit 32 bits (``plan.MAX_COST``), whose sums take half the time. GRANULARITY: number
of blocks that a CTA processes at a time; the blocks of a work item are rounded up to it.
"""

# Triton's calls are not Python's.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import LATENT, ROWS
from flashlatte.runtime.kernel_records import Int32
from flashlatte.split_kv import device
from flashlatte.split_kv.plan import PartialShape

# The shape of a partial output, and its number of elements.
MLA_PARTIAL = PartialShape(ROWS.value, LATENT.value)
PARTIAL = gl.constexpr(MLA_PARTIAL.elements)

# Work items per step of the scan.
_ITEMS = gl.constexpr(128)


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


@gluon.constexpr_function
def _in_each_warp(WARPS):
    """_ITEMS replicated in each warp, so that no reduction crosses warps."""
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
    """The cost of work item 0; 0 if it is not among ``items``."""
    return gl.sum(gl.where(items == 0, costs, 0), 0)


@gluon.jit
def _are_uniform(cost_of_first, total, key_lengths):
    """Whether the average cost of the work items, with the sum ``total``, equals that of the first one. That is
    sufficient, because any ranges and any overhead give correct results."""
    return cost_of_first * key_lengths.num_items == total


@gluon.jit
def _ranges_in_use(num_ranges, total, MIN_COST: gl.constexpr):
    """The number of ranges with work: all, but no more than leave each a cost of MIN_COST."""
    return gl.minimum(num_ranges, gl.maximum(total // MIN_COST, 1))


@gluon.jit
def _quotient(a, b):
    """⌊a / b⌋ of non-negative 32-bit integers: a signed division takes twice as many instructions."""
    return (gl.to_tensor(a).to(gl.uint32) // gl.to_tensor(b).to(gl.uint32)).to(gl.int32)


@gluon.jit
def _cut(total, number, ranges, GRANULARITY: gl.constexpr):
    """⌊number · total / ranges⌋ in whole granules, for number ≤ ranges, without overflow of the product."""
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
    uniform=None,
):
    """``device.Range`` number ``number`` of ``num_ranges``, computed by every warp separately.

    The first ranges are those without work. With ``uniform`` (``UniformRanges``), a range may consist of overhead only.
    """
    gl.static_assert(OVERHEAD % GRANULARITY == 0, "OVERHEAD must be a multiple of GRANULARITY")
    items = gl.arange(0, _ITEMS, _in_each_warp(gl.num_warps()))
    costs = _item_costs(items, key_lengths, BLOCK_N, OVERHEAD, GRANULARITY)
    total = gl.sum(costs, 0)
    cost_of_first = _cost_of_first(items, costs)
    for start in range(_ITEMS, key_lengths.num_items, _ITEMS):
        total += gl.sum(_item_costs(start + items, key_lengths, BLOCK_N, OVERHEAD, GRANULARITY), 0)
    if uniform is None:
        free = gl.to_tensor(0)
        in_use = _ranges_in_use(num_ranges, total, OVERHEAD + GRANULARITY)
    else:
        are_uniform = _are_uniform(cost_of_first, total, key_lengths)
        free = gl.where(are_uniform, uniform.free, 0)
        total -= free * key_lengths.num_items
        in_use = _ranges_in_use(gl.where(are_uniform, uniform.ranges, num_ranges), total, GRANULARITY)
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
    # Convert back to costs that include the overhead.
    begin += free * (first + gl.where(begin > first_cost - free * first, 1, 0))
    end += free * stop
    return device.Range(begin, end, first, stop, first_cost)


@gluon.jit
def ranges_of_item(item, uniform, key_lengths, BLOCK_N: gl.constexpr, OVERHEAD: gl.constexpr):
    """The first range of ``find_range`` with blocks of a work item, and the number of its consecutive ranges.

    For ``uniform.ranges`` ranges and granularity 1, computed by every warp separately. The total cost times
    (number of ranges + 1) must fit 32 bits: a 64-bit division takes as long as everything else.
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
    free = gl.where(_are_uniform(cost_of_first, total, key_lengths), uniform.free, 0)
    total -= free * key_lengths.num_items
    num_ranges = uniform.ranges
    in_use = _ranges_in_use(num_ranges, total, 1)
    begin = before - free * item + OVERHEAD - free
    first = range_containing(begin, total, in_use)
    last = range_containing(begin + device.item_blocks(item, key_lengths, BLOCK_N) - 1, total, in_use)
    return num_ranges - in_use + first, last - first + 1


@gluon.jit
def range_containing(cost, total, ranges):
    """The range that contains ``cost``: the last one that begins at or before it.

    Range r begins at ⌊r · total / ranges⌋, which is at most ``cost`` where r < (cost + 1) · ranges / total.
    """
    return ((cost + 1) * ranges + total - 1) // total - 1


@gluon.jit
def _count(items, scanned, costs, free, key_lengths, begin, end):
    """The number of work items that end before ``begin``, the number that begin before ``end``, and the cost of the
    former.

    Relative to ``begin`` and ``end`` each work item costs ``free`` less; it is subtracted after the scan, so that the
    scan does not depend on it.
    """
    item_end = scanned + gl.associative_scan(costs, 0, _add) - free * items
    is_before = (items < key_lengths.num_items) & (item_end - free <= begin)
    is_begun = (items < key_lengths.num_items) & (item_end - costs < end)
    cost_before = gl.sum(gl.where(is_before, costs, 0), 0)
    return gl.sum(is_before.to(gl.int32), 0), gl.sum(is_begun.to(gl.int32), 0), cost_before


@gluon.jit
def write_partial(partial, row, in_use, values, lse2, FIRST_COL: gl.constexpr):
    """Write normalized ``values`` [rows, columns] of ``row`` [rows] at columns from FIRST_COL as a partial output, as
    ``combine.write_partial`` does; with FIRST_COL 0, also write the base-2 ``lse2`` [rows]."""
    col = FIRST_COL + gl.arange(0, values.shape[1], gl.SliceLayout(0, values.type.layout))
    gl.store(partial + (row * LATENT)[:, None] + col[None, :], values, mask=in_use[:, None])
    if FIRST_COL == 0:
        gl.store(partial + ROWS * LATENT + row, lse2, mask=in_use)
