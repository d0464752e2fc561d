"""The work of a CTA of a portable kernel: blocks of work items, and where their result goes.

Without ``scratch`` a CTA processes a whole work item; otherwise a balanced range, or a fixed split of a work item
(``device`` defines the terms).
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.config import AttentionConfig, StepConfig
from flashlatte.split_kv import combine, device, ranges
from flashlatte.split_kv.outputs import write_lse, write_out
from flashlatte.split_kv.plan import SplitPlan


class SplitConfig(NamedTuple):
    """Compile-time constants of a kernel's work.

    Attributes:
        block_h, block_n: query rows of a group, and keys of a block.
        d_v: width of a value.
        out_align: unit of the strides of ``out`` in elements.
        overhead, split_blocks, max_splits: as in ``SplitPlan``.
        native_fp8: whether the GPU converts e4m3 in hardware, if ``out`` is e4m3.
    """

    block_h: int
    block_n: int
    d_v: int
    out_align: int
    overhead: int
    split_blocks: int | None
    max_splits: int
    native_fp8: bool


def split_config(plan: SplitPlan, block_n: int, out_align: int, *, native_fp8: bool = False) -> SplitConfig:
    fixed = plan.overhead, plan.split_blocks, plan.max_splits
    return SplitConfig(plan.partial.rows, block_n, plan.partial.cols, out_align, *fixed, native_fp8)


class DecodeLaunchPlan(NamedTuple):
    """The launch configuration of a shape: tile sizes, ``online_softmax``'s constants, and the split over CTAs."""

    config: AttentionConfig
    step: StepConfig
    split: SplitPlan


class CtaWork(NamedTuple):
    """The work of a CTA.

    Attributes:
        first, stop: its work items, ``stop`` exclusive.
        number: index of its range; with fixed splits, index of its work item in the launch.
        split: number of its fixed split.
        range, continued: its ``ranges.Range``, and the work item that the range continues, or -1.
    """

    first: Any
    stop: Any
    number: Any
    split: Any
    range: Any
    continued: Any


class GroupRows(NamedTuple):
    """The query rows of a CTA's group in each work item.

    Attributes:
        group, kv_head: the group and its kv head; [rows] if the CTA processes groups of several kv heads.
        first: index of its first row among those of the kv head.
        in_group: [rows], index of each row in its group.
    """

    group: Any
    kv_head: Any
    first: Any
    in_group: Any


class ItemSplit(NamedTuple):
    """Blocks first to stop (exclusive) of work item ``item``, which has ``blocks`` blocks."""

    item: Any
    first: Any
    stop: Any
    blocks: Any


@triton.jit
def find_rows(grid, SPLIT: tl.constexpr):
    """The rows of this CTA's group. The CTAs of the groups that read the same keys have adjacent program ids."""
    group = tl.program_id(0) % grid.num_groups
    first = (group % grid.groups_per_head) * SPLIT.block_h
    return GroupRows(group, group // grid.groups_per_head, first, tl.arange(0, SPLIT.block_h))


@triton.jit
def find_work(number, grid, key_lengths, scratch, SPLIT: tl.constexpr):
    """The work of the CTA ``number`` of a group."""
    if scratch is None:
        nothing = ranges.Range(0, 0, 0, 0, 0)
        return CtaWork(number, number + 1, number, 0, nothing, -1)
    elif SPLIT.split_blocks is None:
        cta_range = ranges.find_range(number, grid.num_splits, key_lengths, SPLIT.block_n, SPLIT.overhead)
        continued = ranges.continued_item(cta_range, SPLIT.overhead)
        return CtaWork(cta_range.first, cta_range.stop, number, 0, cta_range, continued)
    else:
        nothing = ranges.Range(0, 0, 0, 0, 0)
        local_item = number // grid.num_splits
        item = grid.first_item + local_item
        return CtaWork(item, item + 1, local_item, number % grid.num_splits, nothing, -1)


@triton.jit
def split_of(work, item, cost, grid, key_lengths, scratch, SPLIT: tl.constexpr):
    """The CTA's split of a work item that starts at ``cost``. Writes the number of fixed splits to the metadata."""
    blocks = device.item_blocks(item, key_lengths, SPLIT.block_n)
    if scratch is None:
        return ItemSplit(item, 0, blocks, blocks)
    elif SPLIT.split_blocks is None:
        first, stop = ranges.split_of(work.range, cost, blocks, SPLIT.overhead)
        return ItemSplit(item, first, stop, blocks)
    else:
        size, splits = device.fixed_splits(blocks, SPLIT.split_blocks, SPLIT.max_splits)
        first = work.split * size
        items = tl.num_programs(0) // grid.num_groups // grid.num_splits
        PARTIAL: tl.constexpr = SPLIT.block_h * (SPLIT.d_v + 1)
        metadata = device.item_metadata(scratch, items, grid.num_groups, grid.num_splits, PARTIAL)
        tl.store(metadata + work.number, splits.to(tl.float32), mask=(grid.num_splits > 1) & (work.split == 0))
        return ItemSplit(item, first, tl.minimum(first + size, blocks), blocks)


@triton.jit
def write_result(outputs, scratch, work, split, rows, cols, values, lse2, grid, SPLIT: tl.constexpr):
    """Write normalized ``values`` [rows, cols] of a split and their base-2 ``lse2`` [rows]: the result of the work item
    if the split is all of it, otherwise a partial output."""
    if split.first == 0 and split.stop == split.blocks:
        row = rows.first + rows.in_group
        write_out(
            outputs, split.item, rows.kv_head, row, cols, values, lse2, SPLIT.d_v, SPLIT.out_align, SPLIT.native_fp8
        )
        write_lse(outputs, split.item, rows.kv_head, row, lse2)
    elif scratch is not None:
        if SPLIT.split_blocks is None:
            partial = device.partial_of_range(work.number, rows.group, grid.num_groups, split.first > 0)
        else:
            partial = device.partial_of_split(work.number, work.split, rows.group, grid.num_groups, grid.num_splits)
        rows_in_use = outputs.rows - rows.first
        combine.write_partial(
            scratch, partial, rows.in_group, rows_in_use, values, lse2, cols, SPLIT.block_h, SPLIT.d_v
        )


@triton.jit
def write_metadata(work, grid, scratch, SPLIT: tl.constexpr):
    """Write the work item that a balanced range continues."""
    if scratch is not None and SPLIT.split_blocks is None:
        PARTIAL: tl.constexpr = SPLIT.block_h * (SPLIT.d_v + 1)
        metadata = device.range_metadata(scratch, grid.num_splits, grid.num_groups, PARTIAL)
        tl.store(metadata + work.number, work.continued.to(tl.float32))
