"""The epilogue of a tile: normalize, and write out and lse."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import ROWS
from flashlatte.kernels.hopper.vector_layout import to_vector_layout
from flashlatte.runtime.kernel_records import ElementPointer, Float32, Int64, Pointer

_LN2 = gl.constexpr(0.6931471805599453)


class DensePrefillResults(NamedTuple):
    """Outputs. Strides of ``out`` are in units of the config's ``align``."""

    out: Pointer
    out_stride_token: Int64
    out_stride_head: Int64
    lse: ElementPointer
    lse_stride_token: Int64
    lse_stride_head: Int64
    empty_lse: Float32


@gluon.jit
def _store_tile(tile, inverse, work_tile, results, FIRST_ROW: gl.constexpr, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Store the columns below d_v of a tile [64, columns] that begins at column FIRST."""
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, tile.type.layout), assert_trivial=True)
    values = to_vector_layout((tile * inverse[:, None]).to(results.out.dtype.element_ty))
    row = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout))
    COLUMNS: gl.constexpr = tile.shape[1]
    col = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, values.type.layout))
    base = (
        work_tile.token.to(gl.int64) * results.out_stride_token + work_tile.head.to(gl.int64) * results.out_stride_head
    )
    offset = (base + row.to(gl.int64) * results.out_stride_token) * CONFIG.align
    in_use = (row < work_tile.rows)[:, None]
    if CONFIG.d_v < FIRST + COLUMNS:
        in_use = in_use & (col < CONFIG.d_v)[None, :]
    gl.store(results.out + offset[:, None] + col[None, :], values, mask=in_use)


@gluon.jit
def store(output, state, work_tile, results, scale_log2, FIRST_ROW: gl.constexpr, CONFIG: gl.constexpr):
    """Store the tiles of ``output`` and the lse of ``state`` for the work tile's rows from FIRST_ROW on."""
    is_empty = state.row_sum == 0
    inverse = gl.where(is_empty, 0.0, 1.0 / state.row_sum)
    _store_tile(output[0], inverse, work_tile, results, FIRST_ROW, 0, CONFIG)
    if len(output) == 2:
        _store_tile(output[1], inverse, work_tile, results, FIRST_ROW, output[0].shape[1], CONFIG)

    lse = gl.where(is_empty, results.empty_lse, (state.row_max * scale_log2 + gl.log2(state.row_sum)) * _LN2)
    row = FIRST_ROW + gl.arange(0, ROWS, lse.type.layout)
    base = (
        work_tile.token.to(gl.int64) * results.lse_stride_token + work_tile.head.to(gl.int64) * results.lse_stride_head
    )
    gl.store(results.lse + base + row.to(gl.int64) * results.lse_stride_token, lse, mask=row < work_tile.rows)
