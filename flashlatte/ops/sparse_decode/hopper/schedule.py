"""Which blocks of which items a program takes: flashlatte.schedule.device, as Gluon needs it.

An item is a query token of a request; its blocks are those of its own list of 64 indices each, and after them those
of its list into the extra cache. The partition and the places of partial results are those of ``device``, so that its
combine kernel serves; only what scans vectors of lengths is written again, since Gluon wants a layout where Triton
infers one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.sparse_decode.hopper.layouts import threads_layout
from flashlatte.ops.sparse_decode.hopper.tiles import KEYS
from flashlatte.schedule import device


class Place(NamedTuple):
    """What part of the work this program has.

    Attributes:
        part: its items and costs (``device.Part``).
        stride: from item to item of the program.
        number: of the part.
        group: number of its 64 heads among those of an item.
        num_groups: groups of an item.
    """

    part: Any
    stride: Any
    number: Any
    group: Any
    num_groups: Any


class Plan(NamedTuple):
    """What is settled when the kernel is compiled.

    Attributes:
        format: ``tiles.PLAIN``, ``V32`` or ``MODEL1``.
        producer_threads: of the producer, with which a kernel begins.
        has_rope: whether rows have 64 columns more than the 512 of a value.
        has_extra: whether there is an extra cache.
        unit: bytes that the distances of tokens in the cache are multiples of, 16 at most.
        flat: whether tokens follow each other at one distance, over all pages.
        balanced: whether programs take parts of equal cost; else whole items.
        overhead: what starting on an item costs, in blocks.
    """

    format: Any
    producer_threads: Any
    has_rope: Any
    has_extra: Any
    unit: Any
    flat: Any
    balanced: Any
    overhead: Any


class Share(NamedTuple):
    """What a program has of an item.

    Attributes:
        begin, end: blocks, end exclusive.
        blocks: of the item; ``own`` of them are of the item's own list.
        length, extra_length: of the item's lists.
    """

    begin: Any
    end: Any
    blocks: Any
    own: Any
    length: Any
    extra_length: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _costs(items, lists, PLAN: gl.constexpr):
    blocks = device.item_blocks(items, lists, KEYS)
    return gl.where(items < lists.num_items, blocks + PLAN.overhead, 0).to(gl.int64)


@gluon.jit
def _find_part_alike(number, num_parts, lists, PLAN: gl.constexpr):
    """``_find_part`` where all items have the same lengths: nothing is scanned."""
    each = (device.item_blocks(gl.to_tensor(0), lists, KEYS) + PLAN.overhead).to(gl.int64)
    total = each * lists.num_items
    parts = device._parts_in_use(num_parts, total, PLAN.overhead)
    begin = gl.minimum(number * total // parts, total)
    end = gl.minimum((number + 1) * total // parts, total)
    first = begin // each
    return device.Part(begin, end, first.to(gl.int32), ((end + each - 1) // each).to(gl.int32), first * each)


@gluon.jit
def _find_part(number, num_parts, lists, PLAN: gl.constexpr):
    """``device.find_part``."""
    THREADS: gl.constexpr = PLAN.producer_threads
    total = gl.to_tensor(0).to(gl.int64)
    for start in range(0, lists.num_items, THREADS):
        total += gl.sum(_costs(start + gl.arange(0, THREADS, threads_layout(THREADS)), lists, PLAN), 0)
    parts = device._parts_in_use(num_parts, total, PLAN.overhead)
    begin = gl.minimum(number * total // parts, total)
    end = gl.minimum((number + 1) * total // parts, total)

    scanned = gl.to_tensor(0).to(gl.int64)
    first_cost = gl.to_tensor(0).to(gl.int64)
    first = gl.to_tensor(0)
    stop = gl.to_tensor(0)
    for start in range(0, lists.num_items, THREADS):
        items = start + gl.arange(0, THREADS, threads_layout(THREADS))
        costs = _costs(items, lists, PLAN)
        item_end = scanned + gl.associative_scan(costs, 0, _add)
        is_before = (items < lists.num_items) & (item_end <= begin)
        first += gl.sum(is_before.to(gl.int32), 0)
        first_cost = gl.maximum(first_cost, gl.max(gl.where(is_before, item_end, 0), 0))
        stop += gl.sum(((items < lists.num_items) & (item_end - costs < end)).to(gl.int32), 0)
        scanned += gl.sum(costs, 0)
    return device.Part(begin, end, first, stop, first_cost)


@gluon.jit
def find_place(lists, parts, num_groups, PLAN: gl.constexpr):
    """The place of this program. Those of a part are neighbours, so that the L2 cache serves all but the first."""
    program = gl.program_id(0)
    group = program % num_groups
    number = program // num_groups
    if PLAN.balanced:
        if lists.lengths is None and (lists.extra_limit is None or lists.extra_lengths is None):
            part = _find_part_alike(number, parts, lists, PLAN)
        else:
            part = _find_part(number, parts, lists, PLAN)
        return Place(part, 1, number, group, num_groups)
    else:
        nothing = gl.to_tensor(0).to(gl.int64)
        part = device.Part(nothing, nothing, number, lists.num_items, nothing)
        return Place(part, gl.num_programs(0) // num_groups, number, group, num_groups)


@gluon.jit
def share_of(item, cost, place, lists, PLAN: gl.constexpr):
    """The program's share of an item that starts at ``cost``."""
    length = device.key_count(item, lists)
    own = (length + KEYS - 1) // KEYS
    blocks = own
    extra_length = length
    if lists.extra_limit is not None:
        extra_length = device.extra_key_count(item, lists)
        blocks += (extra_length + KEYS - 1) // KEYS
    blocks = gl.maximum(blocks, 1)
    if PLAN.balanced:
        begin, end = device.share(place.part, cost, blocks, PLAN.overhead)
        return Share(begin, end, blocks, own, length, extra_length)
    else:
        return Share(blocks * 0, blocks, blocks, own, length, extra_length)


@gluon.jit
def pairs_of(share):
    """Pairs of blocks that cover a share; the last may lack its second block."""
    return kept((share.end - share.begin + 1) // 2)


@gluon.jit
def kept(count):
    """The same count, used in a way that Triton 3.6 and 3.7 see.

    Their elimination of dead loop arguments overlooks the bounds of inner loops (triton-lang/triton#9036): a count
    that is nothing else would keep the value of the first iteration.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [count], gl.int32, is_pure=False, pack=1)
