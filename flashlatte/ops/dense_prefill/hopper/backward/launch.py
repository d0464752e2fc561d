"""The launcher: workspace, TMA descriptors and grids."""

from __future__ import annotations

import math

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlatte.kernels.triton.rows import HeadRows, Window, head_rows
from flashlatte.ops.dense_prefill.hopper.backward.dq import SUM_COLUMNS, QueryGradient
from flashlatte.ops.dense_prefill.hopper.backward.kernel import backward_kernel
from flashlatte.ops.dense_prefill.hopper.backward.producer import ALIGN, BackwardInputs, TileSource
from flashlatte.ops.dense_prefill.hopper.backward.rows import TOKENS, finish_kernel, prepare_kernel
from flashlatte.ops.dense_prefill.hopper.backward.schedule import KEYS, QUERIES
from flashlatte.ops.dense_prefill.reference import DensePrefillGradients, DensePrefillParams, requests_of
from flashlatte.runtime import checks
from flashlatte.runtime.strides import row_align, strides_in_use
from flashlatte.runtime.tma_descriptors import describe

_SUMS_LAYOUT = gl.NVMMASharedLayout(128, 32, 3)


def backward(params: DensePrefillParams, gradients: DensePrefillGradients) -> None:
    q, k, v = params.q, params.k, params.v
    out, lse, dout, dlse, deterministic, dq, dk, dv = gradients
    q_total, heads, d_qk = q.shape
    k_total, kv_heads, d_v = v.shape
    if q_total == 0 or k_total == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    if dout.data_ptr() % 16 or not checks.rows_aligned(dout):
        dout = dout.clone(memory_format=torch.contiguous_format)
    checks.begins_aligned(q=q, k=k, v=v)
    requests = requests_of(params)
    has_rope = d_qk == 192
    slots = k_total // KEYS.value + requests.count + 2
    blocks = -(-q_total // TOKENS.value)
    tiles_per_head = q_total // QUERIES.value + requests.count + 2
    dq_sums = torch.empty(heads, q_total, d_qk, dtype=torch.float32, device=q.device)
    row_lse = torch.empty(heads, q_total, dtype=torch.float32, device=q.device)
    delta = torch.empty_like(row_lse)
    semaphores = torch.empty(heads, tiles_per_head, dtype=torch.int32, device=q.device) if deterministic else None
    prepare_kernel[(heads * blocks,)](
        _rows(out),
        _rows(dout),
        head_rows(lse, 1),
        head_rows(dlse, 1),
        QueryGradient(dq_sums, semaphores, tiles_per_head),
        row_lse=row_lse,
        delta=delta,
        tokens=q_total,
        heads=heads,
        V_DIM=d_v,
        QK_DIM=d_qk,
        num_warps=4,
    )
    inputs = BackwardInputs(
        q=_source(q, has_rope),
        dout=_source(dout),
        k=_source(k, has_rope),
        v=_source(v),
        lse=row_lse,
        delta=delta,
        total_q=q_total,
    )
    sum_tiles = TensorDescriptor.from_tensor(dq_sums, [1, QUERIES.value, SUM_COLUMNS.value], _SUMS_LAYOUT)
    backward_kernel[(slots * kv_heads,)](
        inputs,
        QueryGradient(sum_tiles, semaphores, tiles_per_head),
        _rows(dk),
        _rows(dv),
        requests,
        Window(params.window_left, params.window_right),
        bisections=(requests.count + 1).bit_length(),
        slots=slots,
        group=heads // kv_heads,
        scale_log2=params.softmax_scale * math.log2(math.e),
        HAS_ROPE=has_rope,
        num_warps=4,
    )
    finish_kernel[(heads * blocks,)](
        _rows(dq),
        dq_sums=dq_sums,
        tokens=q_total,
        heads=heads,
        softmax_scale=params.softmax_scale,
        QK_DIM=d_qk,
        num_warps=4,
    )


def _rows(x: torch.Tensor) -> HeadRows:
    return head_rows(x, row_align(x))


def _source(x: torch.Tensor, has_rope: bool = False) -> TileSource:
    token_stride, head_stride = (stride // ALIGN.value for stride in strides_in_use(x))
    return TileSource(x, token_stride, head_stride, _descriptor(x, 128), _descriptor(x, 64) if has_rope else None)


def _descriptor(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """TMA descriptor of tiles of 64 tokens of a head: axes head, token, column."""
    tokens, heads, width = x.shape
    token_stride, head_stride = strides_in_use(x)
    return describe(x, (heads, tokens, width), (head_stride, token_stride), (1, QUERIES.value, columns))
