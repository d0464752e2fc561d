"""Which blocks of which items a program takes: flashlatte.split_kv.device, as Gluon needs it.

An item is a query token of a request; its blocks are those of its own list of 64 indices each, and after them those
of its list into the extra cache. The partition and the places of partial results are those of ``device``, so that its
combine kernel serves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS, LATENT, ROWS
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.split_kv import device, gluon_parts

# Numbers of a partial result's record: 64 rows and their lse.
RECORD = gl.constexpr(ROWS.value * (LATENT.value + 1))


class Place(NamedTuple):
    """What part of the work this program has.

    Attributes:
        part: its items and costs (``device.Part``).
        stride: from item to item of the program.
        number: of the part.
        parts: of the schedule, or of an item.
        group: number of its 64 heads among those of an item.
        num_groups: groups of an item.
    """

    part: Any
    stride: Any
    number: Any
    parts: Any
    group: Any
    num_groups: Any


class Plan(NamedTuple):
    """What is settled when the kernel is compiled.

    Attributes:
        format: ``tiles.PLAIN``, ``V32`` or ``MODEL1``.
        producer_threads: of the producer, with which a kernel begins.
        has_rope: whether rows have 64 columns more than the 512 of a value.
        has_extra: whether there is an extra cache.
        has_lengths: whether items have lengths of their own, in memory.
        unit: bytes that the distances of tokens in the cache are multiples of, 16 at most.
        flat: whether tokens follow each other at one distance, over all pages.
        balanced: whether programs take parts of equal cost; else whole items.
        even: whether each item is split into as many parts as any other; ``parts`` are then those of an item.
        overhead: what starting on an item costs, in blocks.
        grain: blocks that a program takes at a time: two, or one where each part is one block (``one_block``).
        paired: whether programs of neighbouring groups exchange what they widen (``clusters``).
    """

    format: Any
    producer_threads: Any
    has_rope: Any
    has_extra: Any
    has_lengths: Any
    unit: Any
    flat: Any
    balanced: Any
    even: Any
    overhead: Any
    grain: Any
    paired: Any


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
def find_place(lists, parts, num_groups, PLAN: gl.constexpr):
    """The place of this program. Those of a part are neighbours, so that the L2 cache serves all but the first."""
    program = gl.program_id(0)
    group = program % num_groups
    number = program // num_groups
    if PLAN.balanced:
        if PLAN.even:
            part = gluon_parts.find_even_part(number, parts, lists, KEYS, PLAN.grain)
        elif PLAN.has_lengths:
            part = gluon_parts.find_part(number, parts, lists, KEYS, PLAN.overhead, PLAN.producer_threads, PLAN.grain)
        else:
            part = gluon_parts.find_part_alike(number, parts, lists, KEYS, PLAN.overhead, PLAN.grain)
        return Place(part, 1, number, parts, group, num_groups)
    else:
        nothing = gl.to_tensor(0)
        part = device.Part(nothing, nothing, number, lists.num_items, nothing)
        return Place(part, gl.num_programs(0) // num_groups, number, parts, group, num_groups)


@gluon.jit
def note_continued(scratch, place, PLAN: gl.constexpr):
    """Tell the combine kernel which item this part continues, unless it knows."""
    if PLAN.balanced and not PLAN.even:
        gluon_parts.note_continued(
            scratch, place.part, place.number, place.parts, place.num_groups, RECORD, PLAN.overhead
        )


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
    blocks = gluon_parts.whole_grains(gl.maximum(blocks, 1), PLAN.grain)
    if PLAN.balanced:
        begin, end = device.share(place.part, cost, blocks, PLAN.overhead)
        return Share(begin, end, blocks, own, length, extra_length)
    else:
        return Share(blocks * 0, blocks, blocks, own, length, extra_length)


@gluon.jit
def has_share(item, cost, place, PLAN: gl.constexpr):
    """Whether the program has any of an item that starts at ``cost``: a part may end within an item's overhead."""
    has = item < place.part.stop
    if PLAN.balanced and not PLAN.even:
        has = has & (place.part.end > cost + PLAN.overhead)
    return has


@gluon.jit
def pairs_of(share):
    """Pairs of blocks that cover a share; the last may lack its second block."""
    return opaque((share.end - share.begin + 1) // 2)
