"""A finished tile's way out: divide by the sum, and write out and lse."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.dense_prefill.hopper.forward.tiles import ACC_ROWS, ROWS, VALUES

_LN2 = gl.constexpr(0.6931471805599453)


class Results(NamedTuple):
    """Where results go. Strides of ``out`` come in units of ``UNIT`` numbers, a constant of the kernel."""

    out: Any
    out_stride_token: Any
    out_stride_head: Any
    lse: Any
    lse_stride_token: Any
    lse_stride_head: Any
    empty_lse: Any


@gluon.constexpr_function
def _columns_layout(lane_columns, register_columns):
    """The accumulator's layout with other column bits in a thread's lane and registers."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, bit] for bit in register_columns), [8, 0], [0, 32], [0, 64]],
        lane_bases=[*([0, bit] for bit in lane_columns), [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )


# Stores are 16 bytes wide if a thread has eight neighbouring columns; the accumulator has two. Each step exchanges
# one bit between the four threads of a row, which takes shuffles only.
_HALFWAY = gl.constexpr(_columns_layout([8, 4], [2, 16]))
_STORE = gl.constexpr(_columns_layout([8, 16], [2, 4]))


@gluon.jit
def store(output, state, ticket, results, scale_log2, FIRST_ROW: gl.constexpr, UNIT: gl.constexpr):
    """``output`` [64, 128] and ``state``, of the ticket's rows from FIRST_ROW on."""
    is_empty = state.row_sum == 0
    inverse = gl.where(is_empty, 0.0, 1.0 / state.row_sum)
    values = (output * inverse[:, None]).to(results.out.dtype.element_ty)
    values = gl.convert_layout(gl.convert_layout(values, _HALFWAY), _STORE)
    row = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, _STORE))
    col = gl.arange(0, VALUES, gl.SliceLayout(0, _STORE))
    base = ticket.token.to(gl.int64) * results.out_stride_token + ticket.head.to(gl.int64) * results.out_stride_head
    offset = (base + row.to(gl.int64) * results.out_stride_token) * UNIT
    gl.store(results.out + offset[:, None] + col[None, :], values, mask=(row < ticket.rows)[:, None])

    lse = gl.where(is_empty, results.empty_lse, (state.row_max * scale_log2 + gl.log2(state.row_sum)) * _LN2)
    row = FIRST_ROW + gl.arange(0, ROWS, ACC_ROWS)
    base = ticket.token.to(gl.int64) * results.lse_stride_token + ticket.head.to(gl.int64) * results.lse_stride_head
    gl.store(results.lse + base + row.to(gl.int64) * results.lse_stride_token, lse, mask=row < ticket.rows)
