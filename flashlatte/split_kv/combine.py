"""Merging the partial results of items that were split.

A partial result is a scratch record: float32 [BLOCK_H, D_V], what the part's own softmax gives, and [BLOCK_H], the
base-2 lse of each row, -inf where the part had no key. Records of an item are merged in the order of its keys.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.runtime import dispatch
from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import device, merge_tiles
from flashlatte.split_kv.output_rows import Outputs, write_lse, write_out

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without NVIDIA's backend, where no kernel is OVERLAPPED
    gdc_launch_dependents = gdc_wait = None

_NUM_WARPS = 4


@triton.jit
def write_record(scratch, record, rows_in_use, values, lse2, cols, BLOCK_H: tl.constexpr, D_V: tl.constexpr):
    """Write normalised ``values`` [BLOCK_H, cols] and their base-2 ``lse2`` [BLOCK_H] as a partial result."""
    rows = tl.arange(0, BLOCK_H)
    base = scratch + record * (BLOCK_H * (D_V + 1))
    mask = (rows < rows_in_use)[:, None] & (cols < D_V)[None, :]
    tl.store(base + (rows * D_V)[:, None] + cols[None, :], values, mask=mask)
    tl.store(base + BLOCK_H * D_V + rows, lse2, mask=rows < rows_in_use)


class Records(NamedTuple):
    """The partial results of an item: those of consecutive parts, or (``number`` counts items) of its fixed splits."""

    scratch: Any
    first_part: Any
    number: Any
    splits: Any
    group: Any
    num_groups: Any
    parts: Any


@triton.jit
def _merge(records, rows, cols, IS_FIXED: tl.constexpr, BLOCK_H: tl.constexpr, D_V: tl.constexpr, SPLITS: tl.constexpr):
    """Merged [rows, cols] and base-2 lse [rows] of an item, from SPLITS records at a time."""
    ROWS: tl.constexpr = rows.shape[0]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, cols.shape[0]], tl.float32)
    for start in range(0, records.splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        if IS_FIXED:
            record = device.fixed_record(records.number, split, records.group, records.num_groups, records.parts)
        else:
            record = device.part_record(records.first_part + split, records.group, records.num_groups, split > 0)
        base = records.scratch + record * (BLOCK_H * (D_V + 1))
        is_split = split < records.splits
        part_lse = tl.load(
            base[:, None] + BLOCK_H * D_V + rows[None, :], mask=is_split[:, None], other=float("-inf")
        )  # [SPLITS, ROWS]
        part_out = tl.load(
            base[:, None, None] + (rows * D_V)[None, :, None] + cols[None, None, :],
            mask=is_split[:, None, None] & (cols < D_V)[None, None, :],
            other=0.0,
        )  # [SPLITS, ROWS, COLS]
        new_peak = tl.maximum(peak, tl.max(part_lse, axis=0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(part_lse - shift[None, :])
        old_weight = tl.exp2(peak - shift)
        total = total * old_weight + tl.sum(weight, axis=0)
        merged = merged * old_weight[:, None] + tl.sum(weight[:, :, None] * part_out, axis=0)
        peak = new_peak
    total = tl.where(total == 0, 1.0, total)
    return merged / total[:, None], peak + tl.log2(total)


@kernel
def combine_kernel(
    scratch,
    num_items: tl.int32,
    tokens: tl.int32,
    lengths,
    lengths_stride_request: tl.int64,
    lengths_stride_token: tl.int64,
    limit: tl.int32,
    extra_lengths,
    extra_stride_request: tl.int64,
    extra_stride_token: tl.int64,
    extra_limit: tl.int32,
    out,
    out_stride_request: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_request: tl.int64,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    sink,
    sink_stride: tl.int64,
    heads: tl.int32,
    rows: tl.int32,
    empty_lse: tl.float32,
    num_groups: tl.int32,
    row_blocks: tl.int32,
    parts: tl.int32,
    first_item: tl.int32,
    HAS_EXTRA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D_V: tl.constexpr,
    OVERHEAD: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AT_BOUNDARIES: tl.constexpr,
    NOTED: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLS: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """A program merges PROGRAM_ROWS rows of an item, ROWS at a time, and COLS columns.

    ``parts``: of the schedule, or splits of each item.
    AT_BOUNDARIES: the item is the one first split where a certain part begins, if any is; else it is a certain item.
    NOTED: the parts noted which items they continue (``device.continued_items``), which need not be worked out then.
    OVERLAPPED: launched while the kernel that writes ``scratch`` may still run, but knows its lengths.
    """
    lists = device.KeyLists(
        num_items,
        tokens,
        lengths,
        lengths_stride_request,
        lengths_stride_token,
        limit,
        extra_lengths,
        extra_stride_request,
        extra_stride_token,
        extra_limit if HAS_EXTRA else None,
    )
    outputs = Outputs(
        out,
        out_stride_request,
        out_stride_token,
        out_stride_head,
        lse,
        lse_stride_request,
        lse_stride_token,
        lse_stride_head,
        sink,
        sink_stride,
        tokens,
        heads,
        rows,
        empty_lse,
    )
    col_blocks: tl.constexpr = (D_V + COLS - 1) // COLS
    rows_in_use = tl.minimum(rows, BLOCK_H)
    row_tiles = tl.cdiv(rows_in_use, PROGRAM_ROWS)
    program = tl.program_id(0)
    cols = program % col_blocks * COLS + tl.arange(0, COLS)
    row_tile = program // col_blocks % row_tiles
    group = program // col_blocks // row_tiles % num_groups
    number = program // col_blocks // row_tiles // num_groups
    item = first_item + number

    first_part = 0
    if NOTED:
        if OVERLAPPED:
            gdc_wait()
            gdc_launch_dependents()
        noted = device.continued_items(scratch, parts, num_groups, BLOCK_H * (D_V + 1))
        if AT_BOUNDARIES:
            item, first_part, splits = device.noted_item_split_first_at(number + 1, noted, parts)
        else:
            first_part, splits = device.noted_parts_of_item(item, noted, parts)
    elif AT_BOUNDARIES:
        item, first_part, splits = device.item_split_first_at(number + 1, parts, lists, BLOCK_N, OVERHEAD)
    elif SPLIT_BLOCKS is None:
        first_part, splits = device.parts_of_item(item, parts, lists, BLOCK_N, OVERHEAD)
    else:
        _, splits = device.fixed_splits(device.item_blocks(item, lists, BLOCK_N), SPLIT_BLOCKS, MAX_SPLITS)
    if OVERLAPPED and not NOTED:
        gdc_wait()
        gdc_launch_dependents()
    if splits > 1:
        records = Records(scratch, first_part, number, splits, group, num_groups, parts)
        kv_head = group // row_blocks
        group_row = group % row_blocks * BLOCK_H
        first_row = row_tile * PROGRAM_ROWS
        for start in range(first_row, tl.minimum(first_row + PROGRAM_ROWS, rows_in_use), ROWS):
            row = start + tl.arange(0, ROWS)
            merged, lse2 = _merge(records, row, cols, SPLIT_BLOCKS is not None, BLOCK_H, D_V, SPLITS)
            write_out(outputs, item, kv_head, group_row + row, cols, merged, lse2, D_V, ROW_ALIGN, INTERPRETED)
            if program % col_blocks == 0:
                write_lse(outputs, item, kv_head, group_row + row, lse2)


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one that it depends on has ended."""
    return device.type == "cuda" and torch.version.hip is None and dispatch.compute_capability(device) >= (9, 0)


def record_bytes(block_h: int, d_v: int) -> int:
    """Size of a partial result."""
    return block_h * (d_v + 1) * 4


def launch_combine(
    scratch: torch.Tensor,
    lists: tuple[Any, ...],
    outputs: tuple[Any, ...],
    *,
    items: int,
    num_groups: int,
    row_blocks: int,
    parts: int,
    block_n: int,
    block_h: int,
    d_v: int,
    overhead: int,
    row_align: int,
    first_item: int = 0,
    split_blocks: int | None = None,
    max_splits: int = 0,
    noted: bool = False,
) -> None:
    """Merge what a launch over ``items`` items from ``first_item`` left in ``scratch``, if it can have split any.

    Args:
        lists: the fields of ``device.KeyLists``.
        outputs: from ``output_rows.output_arguments``.
        num_groups, row_blocks: groups of an item, and of each kv head.
        parts: of the balanced schedule; with ``split_blocks``, the records that each item and group has.
        split_blocks, max_splits: of fixed splits; None for balanced parts.
        noted: whether the parts have noted what they continue (``device.continued_items``).
    """
    limit, extra_limit = lists[5], lists[-1] or 0
    if parts == 1 or -(-limit // block_n) + -(-extra_limit // block_n) <= 1:
        return  # nothing can be split
    at_boundaries = split_blocks is None and items >= parts
    *_, rows, _ = outputs
    merges = (parts - 1 if at_boundaries else items) * num_groups
    shape = merge_tiles.Shape(min(rows, block_h), block_h, d_v)
    if split_blocks is not None:
        tile = merge_tiles.of_fixed_splits(shape)
    elif at_boundaries:
        tile = merge_tiles.of_boundaries(shape)
    else:
        tile = merge_tiles.of_items(shape, merges, -(-parts // items))
    overlapped = _overlaps(scratch.device)
    options = {"launch_pdl": True} if overlapped else {}
    combine_kernel[(merges * tile.programs(shape),)](
        scratch,
        *lists[:-1],
        extra_limit,
        *outputs,
        num_groups,
        row_blocks,
        parts,
        first_item,
        HAS_EXTRA=lists[-1] is not None,
        BLOCK_N=block_n,
        BLOCK_H=block_h,
        D_V=d_v,
        # Of no use to what need not work the schedule out, and would make it another variant.
        OVERHEAD=0 if noted else overhead,
        SPLIT_BLOCKS=split_blocks,
        MAX_SPLITS=max_splits,
        AT_BOUNDARIES=at_boundaries,
        NOTED=noted,
        PROGRAM_ROWS=tile.rows * tile.steps,
        ROWS=tile.rows,
        SPLITS=tile.splits,
        COLS=tile.cols,
        ROW_ALIGN=row_align,
        INTERPRETED=dispatch.interpreting(),
        OVERLAPPED=overlapped,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
        **options,
    )
