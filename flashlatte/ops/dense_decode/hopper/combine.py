"""The combine kernel for balanced ranges of few requests, with partial outputs in fp24 (``fp24_partials``).

A request has between two splits and one per SM; with many splits, the warps divide them, so that all are loaded at
once. The ranges of a request are computed from the lengths, before the attention kernel has finished.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashlatte.kernels.hopper.mla_tiles import LATENT, ROWS
from flashlatte.kernels.hopper.ptx import fp24
from flashlatte.kernels.hopper.softmax import NO_SCORE, inverse, lse2_of
from flashlatte.ops.dense_decode.hopper.tiles import STEP_KEYS
from flashlatte.runtime.triton_kernel import gluon_kernel
from flashlatte.split_kv import device
from flashlatte.split_kv.device import KeyLengths, SplitGrid
from flashlatte.split_kv.fp24_partials import PARTIAL, add_splits, addresses, sums_address
from flashlatte.split_kv.gluon_device import UniformRanges, ranges_of_item
from flashlatte.split_kv.outputs import Outputs, row_pointers, write_lse
from flashlatte.split_kv.plan import SplitPlan

_WARPS = gl.constexpr(8)
# Splits that a warp loads at a time.
_SPLITS_IN_FLIGHT = gl.constexpr(8)
# Tile of a warp.
_TILE_ROWS = gl.constexpr(16)
_WARP_COLS = gl.constexpr(16)


@gluon.constexpr_function
def _layout(SPLITS):
    """Layout of [splits, 16 rows, columns]: SPLITS warps hold different splits, and the other warps different
    columns."""
    warp_bases = []
    warp = 1
    while warp < _WARPS.value:
        col = _WARP_COLS.value * warp // SPLITS
        warp_bases.append([warp, 0, 0] if warp < SPLITS else [0, 0, col])
        warp *= 2
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], [0, 0, 8]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=warp_bases,
        block_bases=[],
        shape=[SPLITS, _TILE_ROWS.value, _WARP_COLS.value * _WARPS.value // SPLITS],
    )


@gluon_kernel(by_element=("lengths", "lse"))
def combine_ranges_kernel(
    outputs: Outputs,
    key_lengths: KeyLengths,
    uniform: UniformRanges,
    grid: SplitGrid,
    scratch,
    row_tiles: tl.int32,
    OVERHEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
):
    """A CTA combines 16 rows and some columns of a request. ``row_tiles``: tiles of 16 rows in use, of a group of 64
    rows.

    Its warps divide SPLITS splits and the columns. There are ``uniform.ranges`` ranges; starting a request costs
    OVERHEAD.
    """
    TILES: gl.constexpr = _layout(SPLITS)
    # Layouts of [splits, rows], and of rows.
    SUMS: gl.constexpr = gl.SliceLayout(2, TILES)
    ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    COLS: gl.constexpr = _WARP_COLS * _WARPS // SPLITS
    COL_TILES: gl.constexpr = LATENT // COLS
    cta = gl.program_id(0)
    first_col = cta % COL_TILES * COLS
    first_row = cta // COL_TILES % row_tiles * _TILE_ROWS
    group = cta // COL_TILES // row_tiles % grid.num_groups
    item = cta // COL_TILES // row_tiles // grid.num_groups
    # Lengths may be read before ``gdc_wait``: the preceding kernel has waited for their writer before it allowed this
    # launch.
    first_range, count = ranges_of_item(item, uniform, key_lengths, STEP_KEYS, OVERHEAD)
    row = first_row + gl.arange(0, _TILE_ROWS, ROW)
    col = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, TILES)))
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, SUMS))
    number = device.partial_of_range(first_range + split, group, grid.num_groups, True)  # [SPLITS]
    partial = scratch.to(gl.int64) + number * (PARTIAL * 4)
    stride = grid.num_groups.to(gl.int64) * (2 * PARTIAL * 4)
    first, second = addresses(partial[:, None, None], row[None, :, None], col[None, None, :], first_col)
    first, second = fp24.materialize_int64(first), fp24.materialize_int64(second)
    sums = fp24.materialize_int64(sums_address(partial[:, None], row[None, :]))
    gdc_wait()
    gdc_launch_dependents()
    if count > 1:
        split_of_row = gl.zeros([SPLITS, _TILE_ROWS], gl.int32, SUMS) + split[:, None]
        split_of_number = gl.zeros([SPLITS, _TILE_ROWS, COLS], gl.int32, TILES) + split[:, None, None]
        combined = gl.zeros([SPLITS, _TILE_ROWS, COLS], gl.float32, TILES)
        row_max = gl.full([SPLITS, _TILE_ROWS], NO_SCORE, gl.float32, SUMS)
        row_sum = gl.zeros([SPLITS, _TILE_ROWS], gl.float32, SUMS)
        for start in range(0, count, SPLITS * _SPLITS_IN_FLIGHT):
            # The first split is the one that does not continue the request.
            begins = gl.where(start + split == 0, PARTIAL * 4, 0)
            maxima = ()
            sums_of_splits = ()
            loaded = ()
            for i in gl.static_range(_SPLITS_IN_FLIGHT):
                before = start + i * SPLITS
                is_split = (before + split_of_row < count).to(gl.int32)
                at = sums + before * stride
                if i == 0:
                    at += begins[:, None]
                split_max, split_sum = fp24.load_two(at, is_split)
                maxima += (split_max,)
                sums_of_splits += (split_sum,)
            for i in gl.static_range(_SPLITS_IN_FLIGHT):
                before = start + i * SPLITS
                is_split = (before + split_of_number < count).to(gl.int32)
                distance = before * stride
                if i == 0:
                    distance += begins[:, None, None]
                loaded += (fp24.load(first + distance, second + distance, is_split),)
            combined, row_max, row_sum = add_splits(combined, row_max, row_sum, maxima, sums_of_splits, loaded)
        RESULT: gl.constexpr = gl.SliceLayout(0, TILES)
        total_max = gl.max(row_max, 0)
        weight = gl.exp2(row_max - total_max[None, :])
        total = gl.sum(combined * weight[:, :, None], 0)  # [16, COLS]
        total_sum = gl.sum(row_sum * weight, 0)
        factor = gl.convert_layout(inverse(total_sum), gl.SliceLayout(1, RESULT))
        kv_head = group // grid.groups_per_head
        group_row = group % grid.groups_per_head * ROWS + first_row
        out_row = group_row + gl.arange(0, _TILE_ROWS, gl.SliceLayout(1, RESULT))
        out_col = first_col + gl.arange(0, COLS, gl.SliceLayout(0, RESULT))
        pointers = row_pointers(outputs, item, kv_head, out_row, OUT_ALIGN)[:, None] + out_col[None, :]
        gl.store(
            pointers, (total * factor[:, None]).to(outputs.out.dtype.element_ty), mask=(out_row < outputs.rows)[:, None]
        )
        if first_col == 0:
            write_lse(outputs, item, kv_head, group_row + gl.arange(0, _TILE_ROWS, ROW), lse2_of(total_max, total_sum))


def launch_combine_ranges(
    split: SplitPlan,
    uniform: UniformRanges,
    scratch: torch.Tensor,
    outputs: Outputs,
    lengths: KeyLengths,
    out_align: int,
) -> None:
    """Combine the partial outputs of the ranges of ``split`` in ``scratch``."""
    row_tiles = -(-min(outputs.rows, ROWS.value) // _TILE_ROWS.value)
    expected_splits = split.splits // lengths.num_items
    splits = 1
    while splits < _WARPS.value and splits * _SPLITS_IN_FLIGHT.value < expected_splits:
        splits *= 2
    col_tiles = LATENT.value * splits // (_WARP_COLS.value * _WARPS.value)
    combine_ranges_kernel[(lengths.num_items * split.groups * row_tiles * col_tiles,)](
        outputs,
        lengths,
        uniform,
        split.grid(0),
        scratch=scratch,
        row_tiles=row_tiles,
        OVERHEAD=split.overhead,
        SPLITS=splits,
        OUT_ALIGN=out_align,
        num_warps=_WARPS.value,
        launch_pdl=True,
    )
