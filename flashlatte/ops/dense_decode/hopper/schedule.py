"""Which steps of which requests a CTA takes: ``split_kv.device``, as this kernel needs it."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS, ROWS
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.ptx.threads import lane
from flashlatte.ops.dense_decode.hopper.tiles import PAIR
from flashlatte.split_kv import device
from flashlatte.split_kv.gluon import PARTIAL, find_range


class Group(NamedTuple):
    """The rows of a CTA.

    Attributes:
        number, count: of the group among the groups of a request, and how many those are.
        kv_head: its key head.
        first_row: its first query row among those of the kv head.
        cta: its number among the CTAs with these rows.
    """

    number: Any
    count: Any
    kv_head: Any
    first_row: Any
    cta: Any


class Work(NamedTuple):
    """What a CTA works on.

    Attributes:
        range: its requests and costs (``device.Range``).
        number: of the range; with fixed splits, local request · num_splits + split.
        num_splits: balanced ranges, or the most fixed splits of a request.
        splits: fixed splits that the request has, 1 of balanced ranges.
        group: its rows (``Group``).
    """

    range: Any
    number: Any
    num_splits: Any
    splits: Any
    group: Any


class Plan(NamedTuple):
    """What is settled when the kernel is compiled.

    Attributes:
        one_byte: whether keys are one-byte numbers, which the producer casts.
        few_rows: whether the partitions are those of ``few_rows``.
        has_rope: whether rows have 64 columns more than the 512 of a value.
        box: keys that lie in one page, of the 64 of a block: 64, or 8, 16, 32 if no more divide a page.
        boxes_per_page: so many of them.
        out_align: numbers that the strides of ``out`` are units of: 8 where its rows begin at multiples of 16 bytes,
            else 1.
        overhead: what starting on a request costs, in steps of two blocks.
        split_steps: steps of a fixed split; None for balanced ranges.
        max_splits: splits are longer if a request would have more than so many.
        stream_k: whether a CTA finishes what another began (``fixup``), or leaves that to a combine kernel.
        rounded: whether that is ``combine``, which takes ``rounded_partials`` and finds ranges by itself.
    """

    one_byte: Any
    few_rows: Any
    has_rope: Any
    box: Any
    boxes_per_page: Any
    out_align: Any
    overhead: Any
    split_steps: Any
    max_splits: Any
    stream_k: Any
    rounded: Any


class Split(NamedTuple):
    """What a CTA has of a request.

    Attributes:
        item: the request.
        begin, end: steps, end exclusive: none if its range ends within what starting on the request costs.
        steps: of the request, at least 1: some CTA must write the empty result.
        length: its keys.
        boxes: so many hold these.
    """

    item: Any
    begin: Any
    end: Any
    steps: Any
    length: Any
    boxes: Any


class Table(NamedTuple):
    """The block table: ``pages`` at [request · pages_stride], of a cache of ``num_pages``."""

    pages: Any
    pages_stride: Any
    num_pages: Any


@gluon.jit
def find_group(groups_per_head, num_groups):
    """The rows of this CTA. CTAs of one range are neighbours, so that they read the same keys together.

    Opaque, since the compiler has each partition work out anew, by divisions, what follows from the CTA's number.
    """
    cta = gl.program_id(0)
    group = cta % num_groups
    kv_head = group // groups_per_head
    first_row = (group % groups_per_head) * ROWS
    return Group(opaque(group), num_groups, opaque(kv_head), opaque(first_row), opaque(cta // num_groups))


@gluon.jit
def find_work(group, key_lengths, num_splits, equals, first_item, PLAN: gl.constexpr):
    """The work of this CTA, among those with the same rows."""
    number = group.cta
    if PLAN.split_steps is None:
        # Who waits for what another range has of a request (``fixup``) is launched after that range; and the first
        # ranges, which may have no work, are launched last: b 128, 16 heads 1.009 times as fast.
        number = num_splits - 1 - number
        cta_range = find_range(
            number,
            num_splits,
            key_lengths,
            PAIR,
            PLAN.overhead,
            # Where starting costs nothing, equal lengths have as many ranges as others.
            equals=equals if PLAN.overhead else None,
        )
        return Work(cta_range, number, num_splits, 1, group)
    else:
        item = first_item + number // num_splits
        split = number % num_splits
        steps = device.item_blocks(item, key_lengths, PAIR)
        size, splits = device.fixed_splits(steps, PLAN.split_steps, PLAN.max_splits)
        begin = split * size
        end = gl.minimum(begin + size, steps)
        # A range that has no other request.
        stop = gl.where(split < splits, item + 1, item)
        cta_range = device.Range(begin, end, item, stop, 0)
        return Work(cta_range, number, num_splits, splits, group)


@gluon.jit
def split_of(item, length, cost, work, PLAN: gl.constexpr):
    """The CTA's split of a request with ``length`` keys that starts at ``cost``."""
    steps = gl.maximum((length + PAIR - 1) // PAIR, 1)
    begin, end = device.split_of(work.range, cost, steps, PLAN.overhead)
    return Split(item, begin, end, steps, length, (length + PLAN.box - 1) // PLAN.box)


@gluon.jit
def write_metadata(scratch, work, PLAN: gl.constexpr):
    """Tell the combine kernel which request this range continues, or how many splits a request has."""
    count = work.group.count
    if PLAN.split_steps is not None:
        item = work.number // work.num_splits
        if (work.num_splits > 1) & (work.number % work.num_splits == 0):
            items = gl.num_programs(0) // count // work.num_splits
            metadata = device.item_metadata(scratch, items, count, work.num_splits, PARTIAL)
            gl.store(metadata + item, work.splits.to(gl.float32))
    elif not PLAN.stream_k and not PLAN.rounded:
        metadata = device.range_metadata(scratch, work.num_splits, count, PARTIAL)
        gl.store(metadata + work.number, device.continued_item(work.range, PLAN.overhead).to(gl.float32))


@gluon.jit
def partial(work, continues_item, PLAN: gl.constexpr):
    """Which partial output this CTA writes."""
    group = work.group
    if PLAN.split_steps is None:
        return device.partial_of_range(work.number, group.number, group.count, continues_item)
    else:
        item = work.number // work.num_splits
        return device.partial_of_split(item, work.number % work.num_splits, group.number, group.count, work.num_splits)


@gluon.jit
def page_of(table, split, block, PLAN: gl.constexpr):
    """The page that holds a block of a request, -1 if it is not in the cache. Blocks beyond the last count as the last.

    Where a block has several boxes each lane of a warp has the page of one of them, the last lanes that of the last
    one; -1 also beyond the request's last box.
    """
    BOXES: gl.constexpr = KEYS // PLAN.box
    box = block
    if BOXES > 1:
        box = block * BOXES + gl.minimum(lane(), BOXES - 1)
    column = gl.maximum(gl.minimum(box, split.boxes - 1), 0) // PLAN.boxes_per_page
    page = gl.load(table.pages + split.item.to(gl.int64) * table.pages_stride + column)
    inside = (page >= 0) & (page < table.num_pages)
    if BOXES > 1:
        inside = inside & (box < split.boxes)
    return gl.where(inside, page, -1).to(gl.int32)
