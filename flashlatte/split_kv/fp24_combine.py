"""The combine kernel for few work items on Hopper, with partial outputs in fp24 (``fp24_partials``). It needs no split
metadata: the splits of a work item follow from its number, or from the lengths.

A CTA combines 16 rows and some columns of a work item. Its warps divide the splits and the columns, so that the splits
of an item are all loaded at once.

Equal splits win "v32, b 2" of sparse decode by 16% (21.5 instead of 25.5 µs; docs/notes/sparse-decode.md), 10% of it
due to three bytes per element.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashlatte.kernels.hopper.mla_tiles import LATENT, ROWS
from flashlatte.kernels.hopper.ptx import fp24
from flashlatte.kernels.hopper.softmax import NO_SCORE, inverse, lse2_of
from flashlatte.kernels.triton.online_softmax import sink_weight
from flashlatte.runtime.triton_kernel import gluon_kernel
from flashlatte.split_kv.device import KeyLengths, SplitGrid
from flashlatte.split_kv.fp24_partials import PARTIAL, addresses, sums_address
from flashlatte.split_kv.gluon_device import scan_items
from flashlatte.split_kv.outputs import Outputs, head_pointers, row_pointers, write_lse
from flashlatte.split_kv.plan import SplitPlan
from flashlatte.split_kv.ranges import UniformRanges, ranges_with_item

# Tile of a warp.
_TILE_ROWS = gl.constexpr(16)
_WARP_COLS = gl.constexpr(16)


class Fp24Combine(NamedTuple):
    """Compile-time configuration of the kernel.

    Attributes:
        warps: warps of a CTA.
        splits: warps with different splits; the others have different columns.
        in_flight: splits that a warp loads at a time.
        equal: whether all work items have ``grid.num_splits`` splits, and a range has one partial output; otherwise
            the ranges of a work item follow from the lengths, and a range has two (``device.partial_of_range``).
        block_n, overhead: keys of a block, and cost of starting a work item in blocks (``ranges``).
        out_align: as passed to ``outputs_of``.
    """

    warps: Any
    splits: Any
    in_flight: Any
    equal: Any
    block_n: Any
    overhead: Any
    out_align: Any

    def cols(self) -> int:
        """Columns of a CTA."""
        return _WARP_COLS.value * self.warps // self.splits


@gluon.constexpr_function
def _layout(WARPS, SPLITS):
    """Layout of [splits, 16 rows, columns]: SPLITS warps hold different splits, and the other warps different
    columns."""
    warp_bases = []
    warp = 1
    while warp < WARPS:
        col = _WARP_COLS.value * warp // SPLITS
        warp_bases.append([warp, 0, 0] if warp < SPLITS else [0, 0, col])
        warp *= 2
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], [0, 0, 8]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=warp_bases,
        block_bases=[],
        shape=[SPLITS, _TILE_ROWS.value, _WARP_COLS.value * WARPS // SPLITS],
    )


@gluon.jit
def _add_splits(combined, row_max, row_sum, maxima, sums, values):
    """Add splits, given as tuples ``maxima``, ``sums`` and ``values``, to the splits that are already combined. Returns
    the sum of the values, the row_max that it is relative to, and the sum of the row_sums."""
    COL: gl.constexpr = len(row_max.shape)
    new_max = row_max
    for i in gl.static_range(len(maxima)):
        new_max = gl.maximum(new_max, maxima[i])
    alpha = gl.exp2(row_max - new_max)
    row_sum *= alpha
    combined *= gl.expand_dims(alpha, COL)
    for i in gl.static_range(len(maxima)):
        weight = gl.exp2(maxima[i] - new_max)
        row_sum += weight * sums[i]
        combined += gl.expand_dims(weight, COL) * values[i]
    return combined, new_max, row_sum


@gluon_kernel
def combine_fp24_kernel(
    outputs: Outputs,
    key_lengths: KeyLengths,
    uniform: UniformRanges,
    grid: SplitGrid,
    scratch,
    row_tiles: tl.int32,
    CONFIG: tl.constexpr,
):
    """A CTA combines 16 rows and some columns of a work item. ``row_tiles``: tiles of 16 rows in use, of a group of 64
    rows."""
    SPLITS: gl.constexpr = CONFIG.splits
    IN_FLIGHT: gl.constexpr = CONFIG.in_flight
    TILES: gl.constexpr = _layout(CONFIG.warps, SPLITS)
    # Layouts of [splits, rows], and of rows.
    SUMS: gl.constexpr = gl.SliceLayout(2, TILES)
    ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    COLS: gl.constexpr = _WARP_COLS * CONFIG.warps // SPLITS
    COL_TILES: gl.constexpr = LATENT // COLS
    # Partial outputs of a range.
    EACH: gl.constexpr = 1 if CONFIG.equal else 2
    cta = gl.program_id(0)
    first_col = cta % COL_TILES * COLS
    first_row = cta // COL_TILES % row_tiles * _TILE_ROWS
    group = cta // COL_TILES // row_tiles % grid.num_groups
    item = cta // COL_TILES // row_tiles // grid.num_groups
    if CONFIG.equal:
        count = grid.num_splits
        first_range = item * count
    else:
        # Lengths may be read before ``gdc_wait``: the preceding kernel has waited for their writer before it allowed
        # this launch.
        first_range, count = ranges_with_item(item, uniform, scan_items(), key_lengths, CONFIG.block_n, CONFIG.overhead)
    row = first_row + gl.arange(0, _TILE_ROWS, ROW)
    col = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, TILES)))
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, SUMS))
    number = ((first_range + split).to(gl.int64) * grid.num_groups + group) * EACH  # [SPLITS]
    partial = scratch.to(gl.int64) + number * (PARTIAL * 4)
    stride = grid.num_groups.to(gl.int64) * (EACH * PARTIAL * 4)
    first, second = addresses(partial[:, None, None], row[None, :, None], col[None, None, :], first_col)
    # Computed before the wait for the partial outputs.
    first, second = fp24.materialize_int64(first), fp24.materialize_int64(second)
    sums = fp24.materialize_int64(sums_address(partial[:, None], row[None, :]))
    gdc_wait()
    gdc_launch_dependents()
    if CONFIG.equal or count > 1:
        split_of_row = gl.zeros([SPLITS, _TILE_ROWS], gl.int32, SUMS) + split[:, None]
        split_of_number = gl.zeros([SPLITS, _TILE_ROWS, COLS], gl.int32, TILES) + split[:, None, None]
        combined = gl.zeros([SPLITS, _TILE_ROWS, COLS], gl.float32, TILES)
        row_max = gl.full([SPLITS, _TILE_ROWS], NO_SCORE, gl.float32, SUMS)
        row_sum = gl.zeros([SPLITS, _TILE_ROWS], gl.float32, SUMS)
        for start in range(0, count, SPLITS * IN_FLIGHT):
            # The first split of an item is the one that does not continue it: the second partial output of its range.
            begins = gl.where(start + split == 0, (EACH - 1) * PARTIAL * 4, 0)
            maxima = ()
            sums_of_splits = ()
            loaded = ()
            for i in gl.static_range(IN_FLIGHT):
                before = start + i * SPLITS
                is_split = (before + split_of_row < count).to(gl.int32)
                at = sums + before * stride
                if i == 0:
                    at += begins[:, None]
                split_max, split_sum = fp24.load_two(at, is_split)
                maxima += (split_max,)
                sums_of_splits += (split_sum,)
            for i in gl.static_range(IN_FLIGHT):
                before = start + i * SPLITS
                is_split = (before + split_of_number < count).to(gl.int32)
                distance = before * stride
                if i == 0:
                    distance += begins[:, None, None]
                loaded += (fp24.load(first + distance, second + distance, is_split),)
            combined, row_max, row_sum = _add_splits(combined, row_max, row_sum, maxima, sums_of_splits, loaded)
        total_max = gl.max(row_max, 0)
        if SPLITS > 1:
            weight = gl.exp2(row_max - total_max[None, :])
            combined *= weight[:, :, None]
            row_sum *= weight
        total, total_sum = gl.sum(combined, 0), gl.sum(row_sum, 0)  # [16, COLS], [16]
        _write(outputs, item, group, grid, first_row, first_col, total, total_max, total_sum, CONFIG)


@gluon.jit
def _write(outputs, item, group, grid, first_row, first_col, total, row_max, row_sum, CONFIG: gl.constexpr):
    """Write the sums ``total`` [16, columns] of a work item, and the lse of its rows."""
    LAYOUT: gl.constexpr = total.type.layout
    lse2 = lse2_of(row_max, row_sum)
    row = gl.arange(0, _TILE_ROWS, row_max.type.layout)
    out_row = gl.arange(0, _TILE_ROWS, gl.SliceLayout(1, LAYOUT))
    out_col = first_col + gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))
    factor = inverse(row_sum)
    if CONFIG.equal:
        # The rows of an item are the heads of one token.
        kv_head = 0
        group_row = group * ROWS + first_row
        if outputs.sink is not None:
            head = group_row + row
            factor *= sink_weight(outputs.sink, outputs.sink_stride, head, head < outputs.heads, lse2, row_sum == 0)
        pointers = head_pointers(outputs, item, group_row + out_row, CONFIG.out_align)
    else:
        kv_head = group // grid.groups_per_head
        group_row = group % grid.groups_per_head * ROWS + first_row
        pointers = row_pointers(outputs, item, kv_head, group_row + out_row, CONFIG.out_align)
    values = total * gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT))[:, None]
    in_rows = group_row + out_row < outputs.rows
    gl.store(pointers[:, None] + out_col[None, :], values.to(outputs.out.dtype.element_ty), mask=in_rows[:, None])
    if first_col == 0:
        write_lse(outputs, item, kv_head, group_row + row, lse2)


def launch_combine_fp24(
    split: SplitPlan,
    scratch: torch.Tensor,
    outputs: Outputs,
    lengths: KeyLengths,
    out_align: int,
    block_n: int,
    *,
    uniform: UniformRanges | None = None,
    equal_splits: int | None = None,
) -> None:
    """Combine the partial outputs of all work items in ``scratch``: of the ranges ``uniform``, or ``equal_splits``
    splits of each work item."""
    items = lengths.num_items
    grid = split.grid(0)
    if equal_splits is not None:
        # Two CTAs of four warps per SM.
        config = Fp24Combine(4, 1, 16, True, block_n, split.overhead, out_align)
        grid = grid._replace(num_splits=equal_splits)
    else:
        warps, splits, in_flight = 8, 1, 8
        while splits < warps and splits * in_flight < split.splits // items:
            splits *= 2
        config = Fp24Combine(warps, splits, in_flight, False, block_n, split.overhead, out_align)
    row_tiles = -(-min(outputs.rows, ROWS.value) // _TILE_ROWS.value)
    combine_fp24_kernel[(items * split.groups * row_tiles * LATENT.value // config.cols(),)](
        outputs,
        lengths,
        uniform or UniformRanges(0, 0),
        grid,
        scratch=scratch,
        row_tiles=row_tiles,
        CONFIG=config,
        num_warps=config.warps,
        launch_pdl=True,
    )
