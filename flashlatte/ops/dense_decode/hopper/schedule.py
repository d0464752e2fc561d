"""Which steps of which requests a program takes: flashlatte.schedule.device, as Gluon needs it.

The partition and the places of partial results are those of ``device``, so that its combine kernel serves; only the
functions that scan vectors of lengths are written again, since Gluon wants a layout where Triton infers one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.dense_decode.hopper.tiles import KEYS, LATENT, PAIR, ROWS
from flashlatte.schedule import device

# Numbers of a partial result's record: 64 rows and their lse.
RECORD = gl.constexpr(ROWS.value * (LATENT.value + 1))
# Lengths that a program scans at a time. Every warp scans all of them, rather than wait for the others.
_SCAN = gl.constexpr(128)
_SCANNED = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


class Group(NamedTuple):
    """The rows of a program.

    Attributes:
        number, count: of the group among the groups of a request, and how many those are.
        kv_head: its key head.
        first_row: its first query row among those of the kv head.
    """

    number: Any
    count: Any
    kv_head: Any
    first_row: Any


class Place(NamedTuple):
    """What part of the work this program has.

    Attributes:
        part: its requests and costs (``device.Part``).
        number: of the part; with fixed splits, launched item · parts + split.
        parts: of the schedule; with fixed splits, records that each item and group has.
        group: its rows (``Group``).
    """

    part: Any
    number: Any
    parts: Any
    group: Any


class Plan(NamedTuple):
    """What is settled when the kernel is compiled.

    Attributes:
        has_rope: whether rows have 64 columns more than the 512 of a value.
        blocks_per_page: blocks of 64 keys.
        overhead: what starting on a request costs, in steps of two blocks.
        split_steps: steps of a fixed split; None for a balanced schedule.
        max_splits: splits are longer if a request would have more than so many.
    """

    has_rope: Any
    blocks_per_page: Any
    overhead: Any
    split_steps: Any
    max_splits: Any


class Table(NamedTuple):
    """The block table: ``pages`` at [request · stride], of a cache of ``num_pages``."""

    pages: Any
    stride: Any
    num_pages: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _costs(items, lists, PLAN: gl.constexpr):
    steps = device.item_blocks(items, lists, PAIR)
    return gl.where(items < lists.num_items, steps + PLAN.overhead, 0)


@gluon.jit
def _share_of(total, number, parts):
    """⌊number · total / parts⌋ for number ≤ parts, where the product may be too large."""
    whole = total // parts
    return number * whole + number * (total - whole * parts) // parts


@gluon.jit
def find_part(number, num_parts, lists, PLAN: gl.constexpr):
    """``device.find_part`` with blocks of a step's 128 keys.

    All costs together fit 32 bits (``launch.make_plan``), which are half as long to sum.
    """
    costs = _costs(gl.arange(0, _SCAN, _SCANNED), lists, PLAN)
    total = gl.sum(costs, 0)
    for start in range(_SCAN, lists.num_items, _SCAN):
        total += gl.sum(_costs(start + gl.arange(0, _SCAN, _SCANNED), lists, PLAN), 0)
    # As many as there are, and no more than leaves each a step and its overhead.
    parts = gl.minimum(num_parts, gl.maximum(total // (PLAN.overhead + 1), 1))
    begin = _share_of(total, gl.minimum(number, parts), parts)
    end = _share_of(total, gl.minimum(number + 1, parts), parts)

    first, stop, first_cost = _count(0, 0, costs, lists, begin, end)
    scanned = gl.to_tensor(0)
    for start in range(_SCAN, lists.num_items, _SCAN):
        scanned += gl.sum(costs, 0)
        costs = _costs(start + gl.arange(0, _SCAN, _SCANNED), lists, PLAN)
        before, begun, cost_before = _count(start, scanned, costs, lists, begin, end)
        first += before
        stop += begun
        first_cost += cost_before
    return device.Part(begin, end, first, stop, first_cost)


@gluon.jit
def _count(start, scanned, costs, lists, begin, end):
    """Of the items from ``start``, how many end before ``begin``, begin before ``end``, and what the former cost."""
    items = start + gl.arange(0, _SCAN, _SCANNED)
    item_end = scanned + gl.associative_scan(costs, 0, _add)
    is_before = (items < lists.num_items) & (item_end <= begin)
    is_begun = (items < lists.num_items) & (item_end - costs < end)
    # All in one sum: a reduction is what takes time here.
    sums = gl.sum(gl.where(is_before, (costs.to(gl.int64) << 16) + 1, 0) + gl.where(is_begun, 0x100, 0), 0)
    return (sums & 0xFF).to(gl.int32), (sums >> 8 & 0xFF).to(gl.int32), (sums >> 16).to(gl.int32)


@gluon.jit
def find_split(item, split, lists, PLAN: gl.constexpr):
    """Split number ``split`` of an item, as a part of a schedule that has no other item."""
    steps = device.item_blocks(item, lists, PAIR)
    size, splits = device.fixed_splits(steps, PLAN.split_steps, PLAN.max_splits)
    begin = split * size
    end = gl.minimum(begin + size, steps)
    stop = gl.where(split < splits, item + 1, item)
    return device.Part(begin + PLAN.overhead, end + PLAN.overhead, item, stop, 0)


@gluon.jit
def find_group(row_blocks, num_groups):
    """The rows of this program. Programs of a part are neighbours, so that they read the same keys together."""
    group = gl.program_id(0) % num_groups
    return Group(group, num_groups, group // row_blocks, (group % row_blocks) * ROWS)


@gluon.jit
def find_place(group, lists, parts, first_item, PLAN: gl.constexpr):
    """The place of this program, among those with the same rows."""
    number = gl.program_id(0) // group.count
    if PLAN.split_steps is None:
        part = find_part(number, parts, lists, PLAN)
    else:
        part = find_split(first_item + number // parts, number % parts, lists, PLAN)
    return Place(part, number, parts, group)


@gluon.jit
def note_continued(scratch, place, PLAN: gl.constexpr):
    """Tell the combine kernel which item this part continues."""
    if PLAN.split_steps is None:
        part = place.part
        continues = (part.first < part.stop) & (part.begin > part.first_cost + PLAN.overhead)
        pointer = device.continued_items(scratch, place.parts, place.group.count, RECORD) + place.number
        gl.store(pointer, gl.where(continues, part.first, -1).to(gl.float32))


@gluon.jit
def record(place, continues_item, PLAN: gl.constexpr):
    """Scratch record of this program's partial result."""
    if PLAN.split_steps is None:
        return device.part_record(place.number, place.group.number, place.group.count, continues_item)
    else:
        item = place.number // place.parts
        return device.fixed_record(item, place.number % place.parts, place.group.number, place.group.count, place.parts)


@gluon.jit
def page_of(table, request, block, num_blocks, PLAN: gl.constexpr):
    """The page that holds a block of keys, -1 if it is not in the cache. Blocks beyond the last count as the last."""
    column = gl.maximum(gl.minimum(block, num_blocks - 1), 0) // PLAN.blocks_per_page
    page = gl.load(table.pages + request.to(gl.int64) * table.stride + column)
    return gl.where((page >= 0) & (page < table.num_pages), page, -1).to(gl.int32)


@gluon.jit
def num_blocks(length):
    """Blocks of 64 keys."""
    return (length + KEYS - 1) // KEYS


@gluon.jit
def num_steps(length):
    """Steps of 128 keys, at least 1: some program must write the empty result."""
    return gl.maximum((length + PAIR - 1) // PAIR, 1)
