"""The sums of each row (a token's head) that the backward kernels read."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.config import padded
from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.kernels.triton.online_softmax import LOG2_E, sink_weight
from flashlatte.ops.sparse_attention.reference import SparseAttentionBackwardParams
from flashlatte.runtime.strides import first_stride
from flashlatte.runtime.triton_kernel import kernel

_BLOCK = 16


def row_sums(params: SparseAttentionBackwardParams, d_sink: torch.Tensor) -> torch.Tensor:
    """Float32 [4, s_q · h_q] of ``row_sums_kernel``. Writes ``d_sink`` [h_q]."""
    s_q, h_q, d_v = params.out.shape
    attn_sink = params.attn_sink
    rows = s_q * h_q
    sums = torch.empty(4, rows, dtype=torch.float32, device=params.q.device)
    row_sums_kernel[(-(-rows // _BLOCK),)](
        out=params.out,
        dout=params.dout,
        lse=params.lse,
        dlse=params.dlse,
        attn_sink=attn_sink,
        sink_stride=first_stride(attn_sink),
        rows=rows,
        h_q=h_q,
        sums=sums,
        D_V=d_v,
        WIDTH=padded(d_v),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    torch.sum(sums[3].view(s_q, h_q), dim=0, out=d_sink)
    return sums


@kernel
def row_sums_kernel(
    out,
    dout,
    lse,
    dlse,
    attn_sink,
    sink_stride: tl.int64,
    rows: tl.int64,
    h_q: tl.int32,
    sums,
    D_V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``sums`` [4, rows]; a row is a head of a token: lse in base 2, w, w Σ out · dout - dlse, and the row's term
    of the sink's gradient. A row without keys has +inf, 0, 0, 0.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_use = row < rows
    cols = tl.arange(0, WIDTH)
    offsets = row[:, None] * D_V + cols[None, :]
    mask = in_use[:, None] & (cols < D_V)[None, :]
    product = to_float32(tl.load(out + offsets, mask=mask, other=0)) * to_float32(
        tl.load(dout + offsets, mask=mask, other=0)
    )
    delta = tl.sum(product, axis=1)
    row_lse = tl.load(lse + row, mask=in_use, other=float("-inf"))
    is_empty = row_lse == float("-inf")
    lse2 = tl.where(is_empty, float("inf"), row_lse * LOG2_E)
    weight = tl.full([BLOCK], 1.0, tl.float32)
    d_sink = tl.zeros([BLOCK], tl.float32)
    if attn_sink is not None:
        head = row % h_q
        weight = sink_weight(attn_sink, sink_stride, head, in_use, lse2, is_empty)
        sink2 = tl.load(attn_sink + head * sink_stride, mask=in_use, other=0.0) * LOG2_E
        # 1 - w, without cancellation where w is near 1.
        d_sink = -delta / (1.0 + tl.exp2(lse2 - sink2))
    delta *= weight
    if dlse is not None:
        delta -= tl.load(dlse + row, mask=in_use, other=0.0)
    tl.store(sums + row, lse2, mask=in_use)
    tl.store(sums + rows + row, tl.where(is_empty, 0.0, weight), mask=in_use)
    tl.store(sums + 2 * rows + row, tl.where(is_empty, 0.0, delta), mask=in_use)
    tl.store(sums + 3 * rows + row, tl.where(is_empty, 0.0, d_sink), mask=in_use)
