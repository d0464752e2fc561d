"""A finished tile's way out: divide by the sum, and write out and lse."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.neighbours import neighbours
from flashlatte.kernels.hopper.two_consumers import CHUNK, ROWS
from flashlatte.ops.paged_attention.hopper.tiles import SCORE_ROWS

_LN2 = gl.constexpr(0.6931471805599453)
_LOG2_E = gl.constexpr(1.4426950408889634)


class Results(NamedTuple):
    """Where results go. Strides of ``out`` come in units of the plan's ``align``.

    ``sink``: float32 [h_q] at ``sink_stride``, the score of one more key, whose value is 0, or None.
    """

    out: Any
    out_stride_token: Any
    out_stride_head: Any
    lse: Any
    lse_stride_token: Any
    lse_stride_head: Any
    sink: Any
    sink_stride: Any
    empty_lse: Any


@gluon.jit
def _rows_of(ticket, row, stride_token, stride_head, PACK: gl.constexpr):
    token = (ticket.token + row // PACK).to(gl.int64)
    head = (ticket.pack * PACK + row % PACK).to(gl.int64)
    return token * stride_token + head * stride_head


@gluon.jit
def store(output, state, ticket, results, scale_log2, FIRST_ROW: gl.constexpr, PLAN: gl.constexpr):
    """``output`` [64, 64 * v_chunks] and ``state``, of the tile's rows from FIRST_ROW on."""
    PACK: gl.constexpr = PLAN.pack
    is_empty = state.row_sum == 0
    row_lse = state.row_max * scale_log2 + gl.log2(state.row_sum)
    row = FIRST_ROW + gl.arange(0, ROWS, SCORE_ROWS)
    exists = row < ticket.tokens * PACK
    total = state.row_sum
    if results.sink is not None:
        head = ticket.pack * PACK + row % PACK
        sink = gl.load(results.sink + head.to(gl.int64) * results.sink_stride, mask=exists, other=0.0) * _LOG2_E
        total += gl.exp2(sink - state.row_max * scale_log2)
    inverse = gl.where(is_empty, 0.0, 1.0 / total)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, output.type.layout), assert_trivial=True)
    values = neighbours((output * inverse[:, None]).to(results.out.dtype.element_ty))
    out_row = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout))
    col = gl.arange(0, PLAN.v_chunks * CHUNK, gl.SliceLayout(0, values.type.layout))
    offset = _rows_of(ticket, out_row, results.out_stride_token, results.out_stride_head, PACK) * PLAN.align
    is_out = (out_row < ticket.tokens * PACK)[:, None]
    if PLAN.head_dim_v != PLAN.v_chunks * CHUNK:
        is_out = is_out & (col < PLAN.head_dim_v)[None, :]
    gl.store(results.out + offset[:, None] + col[None, :], values, mask=is_out)

    lse = gl.where(is_empty, results.empty_lse, row_lse * _LN2)
    gl.store(
        results.lse + _rows_of(ticket, row, results.lse_stride_token, results.lse_stride_head, PACK), lse, mask=exists
    )
