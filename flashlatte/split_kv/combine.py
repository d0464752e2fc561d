"""The kernel that combines the partial outputs of split work items.

A partial output is float32 [BLOCK_H, D_V], normalized by the split's own softmax, and the base-2 lse [BLOCK_H] of the
rows, -inf for rows without a key in the split. The kernel combines the partial outputs of a work item in the order of
its keys, as the split metadata list them (``device``).
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, launches_overlap
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import device
from flashlatte.split_kv.device import SplitGrid
from flashlatte.split_kv.outputs import Outputs, write_lse, write_out
from flashlatte.split_kv.plan import PartialShape, SplitPlan

_NUM_WARPS = 4


class CombineTile(NamedTuple):
    """Rows, columns and splits that a CTA combines at a time. A CTA processes ``steps`` tiles of rows."""

    rows: int
    cols: int
    splits: int
    steps: int = 1

    def within(self, rows: int, cols: int) -> CombineTile:
        """The tile, clamped to the size of a partial output."""
        return self._replace(rows=min(self.rows, rows), cols=min(self.cols, 1 << (cols - 1).bit_length()))

    def ctas(self, rows: int, cols: int) -> int:
        """The number of CTAs for a result of ``rows`` and ``cols``."""
        return -(-rows // (self.rows * self.steps)) * -(-cols // self.cols)


# CTAs of four warps, with a tile of 8,192 elements, that are resident on a large GPU.
_RESIDENT = 528
# In the order in which ``tile_for`` tries them: tiles for few work items of many splits first, the smallest first. A
# single tile size makes "v32, b 2" 20% slower (39 instead of 32 µs with 4 x 128 elements; docs/notes/sparse-decode.md).
_TILES = (
    CombineTile(1, 32, 128),
    CombineTile(1, 64, 128),
    CombineTile(1, 128, 64),
    CombineTile(1, 32, 32),
    CombineTile(1, 128, 32),
    CombineTile(1, 512, 16),
    CombineTile(1, 512, 8),
    CombineTile(4, 512, 4),
)
# For boundaries between ranges, which split at most one work item each: few CTAs per boundary, because each of them
# searches for the work item. With 2,000 small CTAs, "b 128, varlen" took 7% longer (docs/notes/dense-decode.md).
_BOUNDARY_TILE = CombineTile(8, 512, 2, steps=2)
# For fixed splits: constant, because the order of sums must not depend on the batch.
_FIXED_TILE = CombineTile(4, 128, 8)


@triton.jit
def write_partial(scratch, number, rows, rows_in_use, values, lse2, cols, BLOCK_H: tl.constexpr, D_V: tl.constexpr):
    """Write normalized ``values`` [rows, cols] and their base-2 ``lse2`` [rows] to ``rows`` of partial output
    ``number``, or of several, with a number for each row."""
    base = scratch + number * (BLOCK_H * (D_V + 1))
    mask = (rows < rows_in_use)[:, None] & (cols < D_V)[None, :]
    tl.store((base + rows * D_V)[:, None] + cols[None, :], values, mask=mask)
    tl.store(base + BLOCK_H * D_V + rows, lse2, mask=rows < rows_in_use)


class Splits(NamedTuple):
    """The partial outputs of a work item: ``count`` consecutive ranges from ``first_range``, or the fixed splits (at
    most ``max_splits``) of work item ``local_item`` of the launch."""

    scratch: Any
    first_range: Any
    local_item: Any
    count: Any
    group: Any
    num_groups: Any
    max_splits: Any


@triton.jit
def _combine(
    splits, rows, cols, IS_FIXED: tl.constexpr, BLOCK_H: tl.constexpr, D_V: tl.constexpr, SPLITS: tl.constexpr
):
    """The combined output [rows, cols] and base-2 lse [rows] of a work item, from SPLITS partial outputs at a time."""
    ROWS: tl.constexpr = rows.shape[0]
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    combined = tl.zeros([ROWS, cols.shape[0]], tl.float32)
    for start in range(0, splits.count, SPLITS):
        split = start + tl.arange(0, SPLITS)
        if IS_FIXED:
            partial = device.partial_of_split(
                splits.local_item, split, splits.group, splits.num_groups, splits.max_splits
            )
        else:
            partial = device.partial_of_range(splits.first_range + split, splits.group, splits.num_groups, split > 0)
        base = splits.scratch + partial * (BLOCK_H * (D_V + 1))
        is_split = split < splits.count
        partial_lse = tl.load(
            base[:, None] + BLOCK_H * D_V + rows[None, :], mask=is_split[:, None], other=float("-inf")
        )  # [SPLITS, ROWS]
        partial_out = tl.load(
            base[:, None, None] + (rows * D_V)[None, :, None] + cols[None, None, :],
            mask=is_split[:, None, None] & (cols < D_V)[None, None, :],
            other=0.0,
        )  # [SPLITS, ROWS, COLS]
        new_max = tl.maximum(row_max, tl.max(partial_lse, axis=0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(partial_lse - shift[None, :])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(weight, axis=0)
        combined = combined * alpha[:, None] + tl.sum(weight[:, :, None] * partial_out, axis=0)
        row_max = new_max
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    return combined / row_sum[:, None], row_max + tl.log2(row_sum)


@kernel
def combine_kernel(
    outputs: Outputs,
    grid: SplitGrid,
    scratch,
    BLOCK_H: tl.constexpr,
    D_V: tl.constexpr,
    IS_FIXED: tl.constexpr,
    AT_BOUNDARIES: tl.constexpr,
    TILE: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """A CTA combines some rows of a work item and some columns: ``TILE``, a ``CombineTile``.

    AT_BOUNDARIES: the CTA's work item is the one that is first split at the beginning of range number + 1, if any;
        otherwise the work item is given by the program id.
    OVERLAPPED: the kernel that writes ``scratch`` may still run (programmatic dependent launch).
    """
    PARTIAL: tl.constexpr = BLOCK_H * (D_V + 1)
    col_tiles: tl.constexpr = (D_V + TILE.cols - 1) // TILE.cols
    cta_rows: tl.constexpr = TILE.rows * TILE.steps
    rows_in_use = tl.minimum(outputs.rows, BLOCK_H)
    row_tiles = tl.cdiv(rows_in_use, cta_rows)
    cta = tl.program_id(0)
    cols = cta % col_tiles * TILE.cols + tl.arange(0, TILE.cols)
    row_tile = cta // col_tiles % row_tiles
    group = cta // col_tiles // row_tiles % grid.num_groups
    number = cta // col_tiles // row_tiles // grid.num_groups
    item = grid.first_item + number

    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    first_range = 0
    if IS_FIXED:
        items = tl.num_programs(0) // col_tiles // row_tiles // grid.num_groups
        metadata = device.item_metadata(scratch, items, grid.num_groups, grid.num_splits, PARTIAL)
        count = tl.load(metadata + number).to(tl.int32)
    else:
        metadata = device.range_metadata(scratch, grid.num_splits, grid.num_groups, PARTIAL)
        if AT_BOUNDARIES:
            item, first_range, count = device.item_split_first_at(number + 1, metadata, grid.num_splits)
        else:
            first_range, count = device.ranges_of_item(item, metadata, grid.num_splits)
    if count > 1:
        splits = Splits(scratch, first_range, number, count, group, grid.num_groups, grid.num_splits)
        kv_head = group // grid.groups_per_head
        group_row = group % grid.groups_per_head * BLOCK_H
        first_row = row_tile * cta_rows
        for start in range(first_row, tl.minimum(first_row + cta_rows, rows_in_use), TILE.rows):
            row = start + tl.arange(0, TILE.rows)
            combined, lse2 = _combine(splits, row, cols, IS_FIXED, BLOCK_H, D_V, TILE.splits)
            write_out(outputs, item, kv_head, group_row + row, cols, combined, lse2, D_V, ROW_ALIGN, NATIVE_FP8)
            if cta % col_tiles == 0:
                write_lse(outputs, item, kv_head, group_row + row, lse2)


def launch_combine(
    plan: SplitPlan, scratch: torch.Tensor, outputs: Outputs, row_align: int, first_item: int, items: int
) -> None:
    """Combine the partial outputs in ``scratch`` of a launch over ``items`` work items from ``first_item``, if the plan
    can split any. ``row_align``: as passed to ``outputs_of``."""
    if not plan.combines:
        return
    rows, cols = plan.partial
    rows_in_use = min(outputs.rows, rows)
    is_fixed = plan.split_blocks is not None
    at_boundaries = not is_fixed and items >= plan.splits
    results = (plan.splits - 1 if at_boundaries else items) * plan.groups
    if is_fixed:
        tile = _FIXED_TILE.within(rows, cols)
    elif at_boundaries:
        tile = _BOUNDARY_TILE.within(rows, cols)
    else:
        tile = tile_for(plan.partial, rows_in_use, results, -(-plan.splits // items))
    overlapped = launches_overlap(scratch.device)
    # One variant for operations with one query token per work item and with several.
    outputs = outputs._replace(tokens=1 if outputs.tokens is None else outputs.tokens)
    combine_kernel[(results * tile.ctas(rows_in_use, cols),)](
        outputs,
        plan.grid(first_item),
        scratch=scratch,
        BLOCK_H=rows,
        D_V=cols,
        IS_FIXED=is_fixed,
        AT_BOUNDARIES=at_boundaries,
        TILE=tile,
        ROW_ALIGN=row_align,
        NATIVE_FP8=converts_e4m3(scratch.device),
        OVERLAPPED=overlapped,
        num_warps=_NUM_WARPS,
        **launch_options(overlapped),
    )


def tile_for(partial: PartialShape, rows_in_use: int, results: int, expected_splits: int) -> CombineTile:
    """The first tile that the expected splits fill by more than half and that needs no more CTAs than are resident."""
    for tile in _TILES:
        tile = tile.within(*partial)
        if tile.splits < 2 * expected_splits and results * tile.ctas(rows_in_use, partial.cols) <= _RESIDENT:
            break
    return tile
