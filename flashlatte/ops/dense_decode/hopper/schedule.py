"""The schedule of a CTA: ``split_kv.device`` for dense decode."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS, ROWS
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.ptx.threads import lane_id
from flashlatte.ops.dense_decode.hopper.tiles import STEP_KEYS
from flashlatte.split_kv import device, ranges
from flashlatte.split_kv.gluon_device import PARTIAL, scan_items


class RowGroup(NamedTuple):
    """The query rows of a CTA.

    Attributes:
        number, count: index of the group, and number of groups of a request.
        kv_head: its kv head.
        first_row: its first query row within the kv head.
        cta: index of the CTA among the CTAs with these rows.
    """

    number: Any
    count: Any
    kv_head: Any
    first_row: Any
    cta: Any


class DenseDecodeWork(NamedTuple):
    """The work of a CTA.

    Attributes:
        range: its requests and costs (``ranges.Range``).
        number: index of the range; with fixed splits, local request · num_splits + split.
        num_splits: number of balanced ranges, or maximum number of fixed splits of a request.
        splits: number of fixed splits of the request; 1 for balanced ranges.
        group: its rows (``RowGroup``).
    """

    range: Any
    number: Any
    num_splits: Any
    splits: Any
    group: Any


class DenseDecodeConfig(NamedTuple):
    """Compile-time configuration of the kernel.

    Attributes:
        one_byte: whether keys are one-byte elements, which the producer casts.
        few_rows: whether the kernel runs the partitions of ``few_rows``.
        fp8: whether the kernel runs the partitions of ``fp8``.
        has_rope: whether rows have 64 columns of rope after the 512 of the latent.
        box: keys per TMA box, all of one page: 64, or 8, 16, 32 if the page size requires it.
        boxes_per_page: boxes of a page.
        out_align: unit of the strides of ``out`` in elements: 8 if its rows are aligned to 16 bytes, else 1.
        overhead: cost of starting a request, in steps of two blocks.
        split_steps: steps of a fixed split; None for balanced ranges.
        max_splits: maximum number of fixed splits of a request; splits are longer if it would have more.
        stream_k: whether CTAs combine partial outputs themselves (``fixup``) instead of a combine kernel.
        fp24_partials: whether the combine kernel is ``split_kv.fp24_combine``, which needs no metadata.
        prefetch: whether the producer prefetches the keys of the next step into L2.
    """

    one_byte: Any
    few_rows: Any
    fp8: Any
    has_rope: Any
    box: Any
    boxes_per_page: Any
    out_align: Any
    overhead: Any
    split_steps: Any
    max_splits: Any
    stream_k: Any
    fp24_partials: Any
    prefetch: Any


class DenseDecodeSplit(NamedTuple):
    """The split of a request that a CTA processes.

    Attributes:
        item: the request.
        begin, end: steps, end exclusive; empty if the range ends within the overhead of the request.
        steps: steps of the request, at least 1, so that a CTA also writes the result of a request without keys.
        length: keys of the request.
        boxes: boxes of these keys.
    """

    item: Any
    begin: Any
    end: Any
    steps: Any
    length: Any
    boxes: Any


@gluon.jit
def find_group(grid):
    """The row group of this CTA. CTAs of the same range have adjacent program ids, so that they read the same keys at
    the same time.

    Opaque: the compiler would otherwise recompute the divisions of the program id in each partition.
    """
    cta = gl.program_id(0)
    group = cta % grid.num_groups
    kv_head = group // grid.groups_per_head
    first_row = (group % grid.groups_per_head) * ROWS
    return RowGroup(opaque(group), grid.num_groups, opaque(kv_head), opaque(first_row), opaque(cta // grid.num_groups))


@gluon.jit
def find_work(group, key_lengths, grid, uniform, CONFIG: gl.constexpr):
    """The work of this CTA."""
    number = group.cta
    if CONFIG.split_steps is None:
        # Reversed: a CTA that waits for a later range (``fixup``) launches after it; and the first ranges, which may
        # have no work, launch last: b 128, 16 heads 1.009 times as fast.
        number = grid.num_splits - 1 - number
        cta_range = ranges.find_range(
            number,
            grid.num_splits,
            key_lengths,
            STEP_KEYS,
            CONFIG.overhead,
            # Without overhead, uniform lengths use all ranges as well.
            uniform=uniform if CONFIG.overhead else None,
            items=scan_items(),
        )
        return DenseDecodeWork(cta_range, number, grid.num_splits, 1, group)
    else:
        item = grid.first_item + number // grid.num_splits
        split = number % grid.num_splits
        steps = device.item_blocks(item, key_lengths, STEP_KEYS)
        size, splits = device.fixed_splits(steps, CONFIG.split_steps, CONFIG.max_splits)
        begin = split * size
        end = gl.minimum(begin + size, steps)
        # A range with a single request.
        stop = gl.where(split < splits, item + 1, item)
        cta_range = ranges.Range(begin, end, item, stop, 0)
        return DenseDecodeWork(cta_range, number, grid.num_splits, splits, group)


@gluon.jit
def split_of(item, length, cost, work, CONFIG: gl.constexpr):
    """The CTA's split of the request with ``length`` keys that starts at ``cost``."""
    steps = gl.maximum((length + STEP_KEYS - 1) // STEP_KEYS, 1)
    begin, end = ranges.split_of(work.range, cost, steps, CONFIG.overhead)
    return DenseDecodeSplit(item, begin, end, steps, length, (length + CONFIG.box - 1) // CONFIG.box)


@gluon.jit
def write_metadata(scratch, work, CONFIG: gl.constexpr):
    """Write the split metadata: which request this range continues, or the number of splits of a request."""
    count = work.group.count
    if CONFIG.split_steps is not None:
        item = work.number // work.num_splits
        if (work.num_splits > 1) & (work.number % work.num_splits == 0):
            items = gl.num_programs(0) // count // work.num_splits
            metadata = device.item_metadata(scratch, items, count, work.num_splits, PARTIAL)
            gl.store(metadata + item, work.splits.to(gl.float32))
    elif not CONFIG.stream_k and not CONFIG.fp24_partials:
        metadata = device.range_metadata(scratch, work.num_splits, count, PARTIAL)
        gl.store(metadata + work.number, ranges.continued_item(work.range, CONFIG.overhead).to(gl.float32))


@gluon.jit
def partial(work, continues_item, CONFIG: gl.constexpr):
    """Index of the partial output of this CTA."""
    group = work.group
    if CONFIG.split_steps is None:
        return device.partial_of_range(work.number, group.number, group.count, continues_item)
    else:
        item = work.number // work.num_splits
        return device.partial_of_split(item, work.number % work.num_splits, group.number, group.count, work.num_splits)


@gluon.jit
def page_of(table, split, block, CONFIG: gl.constexpr):
    """The page of a block of a request, or -1 if it is not in the cache. Blocks after the last one give the last page.

    If a block has several boxes, each lane of a warp gets the page of one box, and the remaining lanes that of the last
    box; -1 also after the request's last box.
    """
    BOXES: gl.constexpr = KEYS // CONFIG.box
    box = block
    if BOXES > 1:
        box = block * BOXES + gl.minimum(lane_id(), BOXES - 1)
    column = gl.maximum(gl.minimum(box, split.boxes - 1), 0) // CONFIG.boxes_per_page
    page = gl.load(table.pages + split.item.to(gl.int64) * table.stride + column)
    inside = (page >= 0) & (page < table.num_pages)
    if BOXES > 1:
        inside = inside & (box < split.boxes)
    return gl.where(inside, page, -1).to(gl.int32)
