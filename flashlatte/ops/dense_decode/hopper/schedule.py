"""Which steps of which requests a program takes: flashlatte.split_kv.device, as Gluon needs it.

The partition and the places of partial results are those of ``device``, so that its combine kernel serves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS, LATENT, ROWS
from flashlatte.ops.dense_decode.hopper.tiles import PAIR
from flashlatte.split_kv import device, gluon_parts

# Numbers of a partial result's record: 64 rows and their lse.
RECORD = gl.constexpr(ROWS.value * (LATENT.value + 1))
# Of the producer, with which a kernel begins.
_THREADS = gl.constexpr(128)


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
        passes_on: whether parts merge the requests that they share (``partial``), or leave that to the combine kernel.
    """

    has_rope: Any
    blocks_per_page: Any
    overhead: Any
    split_steps: Any
    max_splits: Any
    passes_on: Any


class Table(NamedTuple):
    """The block table: ``pages`` at [request · stride], of a cache of ``num_pages``."""

    pages: Any
    stride: Any
    num_pages: Any


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
        # Who waits for another part's result (``partial``) is launched after that part.
        number = parts - 1 - number
        part = gluon_parts.find_part(number, parts, lists, PAIR, PLAN.overhead, _THREADS)
    else:
        part = find_split(first_item + number // parts, number % parts, lists, PLAN)
    return Place(part, number, parts, group)


@gluon.jit
def note_continued(scratch, place, PLAN: gl.constexpr):
    """Tell the combine kernel which item this part continues."""
    if PLAN.split_steps is None and not PLAN.passes_on:
        gluon_parts.note_continued(
            scratch, place.part, place.number, place.parts, place.group.count, RECORD, PLAN.overhead
        )


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
