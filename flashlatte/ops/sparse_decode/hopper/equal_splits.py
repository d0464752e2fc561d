"""The combine kernel for work items that all have the same number of splits.

Wins "v32, b 2" by 16% (21.5 instead of 25.5 µs; docs/notes/sparse-decode.md), 10% of it due to three bytes per element
(``fp24_partials``). There is no metadata: the splits are the same for all items.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashlatte.kernels.hopper.mla_tiles import LATENT, ROWS
from flashlatte.kernels.hopper.ptx import fp24
from flashlatte.kernels.hopper.softmax import inverse, lse2_of
from flashlatte.kernels.triton.online_softmax import sink_weight
from flashlatte.runtime.triton_kernel import gluon_kernel
from flashlatte.split_kv.fp24_partials import PARTIAL, add_splits, addresses, sums_address
from flashlatte.split_kv.outputs import Outputs, head_pointers, write_lse

# Tile of a CTA, 16 columns per warp, and splits per iteration.
_TILE_ROWS = gl.constexpr(16)
_TILE_COLS = gl.constexpr(64)
_COL_TILES = gl.constexpr(LATENT.value // _TILE_COLS.value)
_SPLITS_IN_FLIGHT = gl.constexpr(16)
_TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], [0, 8]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[16, 64],
    )
)
_ROWS = gl.constexpr(gl.SliceLayout(1, _TILE))


@gluon.jit
def partial_of(scratch, number, group, num_groups):
    """Pointer to the partial output of a range and a group of heads."""
    return scratch + (number * num_groups + group).to(gl.int64) * PARTIAL


@gluon.jit
def _load(first, second, exists):
    """Load [16, 64] elements of a partial output; 0 if it does not exist."""
    return fp24.load(first, second, gl.zeros([_TILE_ROWS, _TILE_COLS], gl.int32, _TILE) + exists)


@gluon.jit
def _load_sums(sums, exists):
    """Load row_max and row_sum [16]; -inf and 0 if the partial output does not exist."""
    return fp24.load_two(sums, gl.zeros([_TILE_ROWS], gl.int32, _ROWS) + exists)


@gluon_kernel(same={"outputs_rows": "outputs_heads"})
def combine_equal_kernel(
    outputs: Outputs,
    scratch,
    num_groups: tl.int32,
    row_tiles: tl.int32,
    splits: tl.int32,
    OUT_ALIGN: tl.constexpr,
):
    """A CTA combines 16 rows and 64 columns of a work item. ``row_tiles``: tiles of 16 rows in use, of a group of 64
    heads."""
    cta = gl.program_id(0)
    first_col = cta % _COL_TILES * _TILE_COLS
    first_row = cta // _COL_TILES % row_tiles * _TILE_ROWS
    group = cta // _COL_TILES // row_tiles % num_groups
    item = cta // _COL_TILES // row_tiles // num_groups
    row = first_row + gl.arange(0, _TILE_ROWS, _ROWS)
    col = gl.arange(0, _TILE_COLS, gl.SliceLayout(0, _TILE))
    partial = partial_of(scratch, item * splits, group, num_groups).to(gl.int64)
    stride = num_groups.to(gl.int64) * (PARTIAL * 4)
    first, second = addresses(partial, row[:, None], col[None, :], first_col)
    # Computed before the wait for the partial outputs.
    first, second = fp24.materialize_int64(first), fp24.materialize_int64(second)
    sums = fp24.materialize_int64(sums_address(partial, row))
    combined = gl.zeros([_TILE_ROWS, _TILE_COLS], gl.float32, _TILE)
    row_max = gl.full([_TILE_ROWS], float("-inf"), gl.float32, _ROWS)
    row_sum = gl.zeros([_TILE_ROWS], gl.float32, _ROWS)
    gdc_wait()
    gdc_launch_dependents()
    for split in range(0, splits, _SPLITS_IN_FLIGHT):
        maxima = ()
        sums_of_splits = ()
        loaded = ()
        for i in gl.static_range(_SPLITS_IN_FLIGHT):
            split_max, split_sum = _load_sums(sums + (split + i) * stride, (split + i < splits).to(gl.int32))
            maxima += (split_max,)
            sums_of_splits += (split_sum,)
        for i in gl.static_range(_SPLITS_IN_FLIGHT):
            distance = (split + i) * stride
            loaded += (_load(first + distance, second + distance, (split + i < splits).to(gl.int32)),)
        combined, row_max, row_sum = add_splits(combined, row_max, row_sum, maxima, sums_of_splits, loaded)

    factor = inverse(row_sum)
    lse2 = lse2_of(row_max, row_sum)
    head = group * ROWS + row
    in_heads = head < outputs.heads
    if outputs.sink is not None:
        factor *= sink_weight(outputs.sink, outputs.sink_stride, head, in_heads, lse2, row_sum == 0)
    pointers = head_pointers(outputs, item, head, OUT_ALIGN)[:, None] + (first_col + col)[None, :]
    gl.store(pointers, (combined * factor[:, None]).to(outputs.out.dtype.element_ty), mask=in_heads[:, None])
    if first_col == 0:
        write_lse(outputs, item, 0, head, lse2)


def launch_combine_equal(scratch: torch.Tensor, outputs: Outputs, items: int, splits: int, out_align: int) -> None:
    """Combine the partial outputs in ``scratch`` of ``items`` work items with ``splits`` splits each."""
    num_groups = -(-outputs.heads // ROWS.value)
    row_tiles = -(-min(outputs.heads, ROWS.value) // _TILE_ROWS.value)
    combine_equal_kernel[(items * num_groups * row_tiles * _COL_TILES.value,)](
        outputs,
        scratch=scratch,
        num_groups=num_groups,
        row_tiles=row_tiles,
        splits=splits,
        OUT_ALIGN=out_align,
        num_warps=4,
        launch_pdl=True,
    )
