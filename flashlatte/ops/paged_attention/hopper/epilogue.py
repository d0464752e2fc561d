"""The epilogue of a tile: normalize, and write out and lse."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import CHUNK, ROWS
from flashlatte.kernels.hopper.vector_layout import to_vector_layout
from flashlatte.runtime.kernel_records import ElementPointer, Float32, Int64, Pointer

_LN2 = gl.constexpr(0.6931471805599453)
_LOG2_E = gl.constexpr(1.4426950408889634)


class PagedPrefillResults(NamedTuple):
    """Outputs. Strides of ``out`` are in units of the config's ``align``.

    ``sink``: float32 [h_q] with stride ``sink_stride``: the score of an additional key with value 0; or None.
    """

    out: Pointer
    out_stride_token: Int64
    out_stride_head: Int64
    lse: ElementPointer
    lse_stride_token: Int64
    lse_stride_head: Int64
    sink: ElementPointer
    sink_stride: Int64
    empty_lse: Float32


@gluon.jit
def _rows_of(work_tile, row, stride_token, stride_head, PACK: gl.constexpr):
    token = (work_tile.token + row // PACK).to(gl.int64)
    head = (work_tile.pack * PACK + row % PACK).to(gl.int64)
    return token * stride_token + head * stride_head


@gluon.jit
def store(output, state, work_tile, results, scale_log2, FIRST_ROW: gl.constexpr, CONFIG: gl.constexpr):
    """Store ``output`` ([64, 64 * v_chunks],) and the lse of ``state`` for the tile's rows from FIRST_ROW on."""
    PACK: gl.constexpr = CONFIG.pack
    tile = output[0]
    is_empty = state.row_sum == 0
    row_lse = state.row_max * scale_log2 + gl.log2(state.row_sum)
    row = FIRST_ROW + gl.arange(0, ROWS, row_lse.type.layout)
    exists = row < work_tile.tokens * PACK
    total = state.row_sum
    if results.sink is not None:
        head = work_tile.pack * PACK + row % PACK
        sink = gl.load(results.sink + head.to(gl.int64) * results.sink_stride, mask=exists, other=0.0) * _LOG2_E
        total += gl.exp2(sink - state.row_max * scale_log2)
    inverse = gl.where(is_empty, 0.0, 1.0 / total)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, tile.type.layout), assert_trivial=True)
    values = to_vector_layout((tile * inverse[:, None]).to(results.out.dtype.element_ty))
    out_row = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout))
    col = gl.arange(0, CONFIG.v_chunks * CHUNK, gl.SliceLayout(0, values.type.layout))
    offset = _rows_of(work_tile, out_row, results.out_stride_token, results.out_stride_head, PACK) * CONFIG.align
    is_out = (out_row < work_tile.tokens * PACK)[:, None]
    if CONFIG.head_dim_v != CONFIG.v_chunks * CHUNK:
        is_out = is_out & (col < CONFIG.head_dim_v)[None, :]
    gl.store(results.out + offset[:, None] + col[None, :], values, mask=is_out)

    lse = gl.where(is_empty, results.empty_lse, row_lse * _LN2)
    gl.store(
        results.lse + _rows_of(work_tile, row, results.lse_stride_token, results.lse_stride_head, PACK),
        lse,
        mask=exists,
    )
