"""Addresses of the result rows of a work item, and stores of out and lse."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import float_to_e4m3, from_float32
from flashlatte.kernels.triton.online_softmax import LN_2, sink_weight
from flashlatte.runtime.kernel_records import ElementPointer, Float32, Int32, Int64, OptionalInt32, Pointer
from flashlatte.runtime.strides import first_stride
from flashlatte.split_kv.device import request_and_token


class Outputs(NamedTuple):
    """The outputs of work items: out [b, s_q, h_q, d_v] and lse [b, h_q, s_q].

    Row r of kv head k of work item i is query token i % tokens + r // heads of request i // tokens, head k · heads + r
    % heads. With tokens = None a work item has the rows of all tokens of a request, with tokens = s_q those of one
    token.

    Attributes:
        out_stride_request, out_stride_token, out_stride_head: in units of ROW_ALIGN elements.
        lse_stride_request, lse_stride_token, lse_stride_head: in elements.
        sink: float32 [h_q] with stride sink_stride; out is scaled by e^lse / (e^lse + e^sink). None: no sink.
        tokens: work items of a request; None: 1.
        heads: query heads of a kv head.
        rows: query rows of a kv head in a work item.
        empty_lse: lse of a row without a visible key.
        tiles: int32 [items, tiles_stride], or None. If given, tokens are packed: out is [T, h_q, d_v] and lse [T, h_q],
            entries 0 and 1 of a work item are its first token and its number of tokens, and ``rows`` is the maximum
            number of rows.
        out_scale: scale of an e4m3 ``out``, which stores values divided by it: one float32; None: ``out_scale_value``.
    """

    out: Pointer
    out_stride_request: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    lse: ElementPointer
    lse_stride_request: Int64
    lse_stride_token: Int64
    lse_stride_head: Int64
    sink: ElementPointer
    sink_stride: Int64
    tokens: OptionalInt32
    heads: Int32
    rows: Int32
    empty_lse: Float32
    tiles: Pointer = None
    tiles_stride: Int64 = 0
    out_scale: Pointer = None
    out_scale_value: Float32 = 1.0


def outputs_of(
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    empty_lse: float,
    row_align: int,
    *,
    h_kv: int | None = None,
) -> Outputs:
    """Make ``Outputs`` from out [b, s_q, h_q, d_v] and lse [b, h_q, s_q].

    ``h_kv``: the number of kv heads, if a work item has the rows of all tokens of a request; None: a work item is a
    token, and all its heads have the same keys.
    """
    _, s_q, h_q, _ = out.shape
    heads = h_q if h_kv is None else h_q // h_kv
    out_request, out_token, out_head, _ = out.stride()
    lse_request, lse_head, lse_token = lse.stride()
    return Outputs(
        out,
        out_request // row_align,
        out_token // row_align,
        out_head // row_align,
        lse,
        lse_request,
        lse_token,
        lse_head,
        sink,
        first_stride(sink),
        tokens=s_q if h_kv is None else None,
        heads=heads,
        rows=heads if h_kv is None else s_q * heads,
        empty_lse=empty_lse,
    )


@triton.jit
def _request_token_head(outputs, item, kv_head, rows):
    request, token = request_and_token(item, outputs.tokens)
    if outputs.tiles is None:
        token += rows // outputs.heads
    else:
        token = tl.load(outputs.tiles + item * outputs.tiles_stride) + rows // outputs.heads
    head = kv_head * outputs.heads + rows % outputs.heads
    return request, token, head


@triton.jit
def _in_item(outputs, item, rows):
    in_item = rows < outputs.rows
    if outputs.tiles is not None:
        tokens = tl.load(outputs.tiles + item * outputs.tiles_stride + 1)
        in_item = in_item & (rows < tokens * outputs.heads)
    return in_item


@triton.jit
def row_pointers(outputs, item, kv_head, rows, ROW_ALIGN: tl.constexpr):
    """Pointers to rows of a work item in ``out``."""
    request, token, head = _request_token_head(outputs, item, kv_head, rows)
    offset = request * outputs.out_stride_request + token * outputs.out_stride_token + head * outputs.out_stride_head
    return outputs.out + offset * ROW_ALIGN


@triton.jit
def head_pointers(outputs, item, heads, ROW_ALIGN: tl.constexpr):
    """``row_pointers`` for work items whose rows are the heads of one token."""
    request, token = request_and_token(item, outputs.tokens)
    offset = (
        request.to(tl.int64) * outputs.out_stride_request
        + token.to(tl.int64) * outputs.out_stride_token
        + heads.to(tl.int64) * outputs.out_stride_head
    )
    return outputs.out + offset * ROW_ALIGN


@triton.jit
def write_out(
    outputs,
    item,
    kv_head,
    rows,
    cols,
    values,
    lse2,
    D_V: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    NATIVE_FP8: tl.constexpr = False,
):
    """Write normalized ``values`` [rows, cols] of a work item with base-2 lse ``lse2`` [rows].

    NATIVE_FP8: whether the GPU converts e4m3 in hardware, if ``out`` is e4m3.
    """
    in_item = _in_item(outputs, item, rows)
    if outputs.sink is not None:
        _, _, head = _request_token_head(outputs, item, kv_head, rows)
        values *= sink_weight(outputs.sink, outputs.sink_stride, head, in_item, lse2, lse2 == float("-inf"))[:, None]
    pointers = row_pointers(outputs, item, kv_head, rows, ROW_ALIGN)
    if outputs.out.dtype.element_ty == tl.uint8:
        scale = outputs.out_scale_value
        if outputs.out_scale is not None:
            scale = tl.load(outputs.out_scale)
        stored = float_to_e4m3(values * tl.div_rn(1.0, scale), NATIVE_FP8)
    else:
        stored = from_float32(values, outputs.out.dtype.element_ty)
    tl.store(pointers[:, None] + cols[None, :], stored, mask=in_item[:, None] & (cols < D_V)[None, :])


@triton.jit
def write_lse(outputs, item, kv_head, rows, lse2):
    """Write the lse of rows of a work item, given as base-2 ``lse2`` [rows]."""
    request, token, head = _request_token_head(outputs, item, kv_head, rows)
    lse = tl.where(lse2 == float("-inf"), outputs.empty_lse, lse2 * LN_2)
    offset = request * outputs.lse_stride_request + token * outputs.lse_stride_token + head * outputs.lse_stride_head
    tl.store(outputs.lse + offset, lse, mask=_in_item(outputs, item, rows))
