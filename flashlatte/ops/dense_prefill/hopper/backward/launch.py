"""The launcher: workspace, TMA descriptors and grids."""

from __future__ import annotations

import math

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlatte.ops.dense_prefill.hopper.backward.dq import SUM_COLUMNS
from flashlatte.ops.dense_prefill.hopper.backward.kernel import backward_kernel
from flashlatte.ops.dense_prefill.hopper.backward.rows import TOKENS, finish_kernel, prepare_kernel
from flashlatte.ops.dense_prefill.hopper.backward.schedule import KEYS, QUERIES
from flashlatte.runtime import checks
from flashlatte.runtime.strides import row_align, strides_in_use
from flashlatte.runtime.tma_descriptors import describe

_SUMS_LAYOUT = gl.NVMMASharedLayout(128, 32, 3)


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    q_total, heads, d_qk = q.shape
    k_total, kv_heads, d_v = v.shape
    if q_total == 0 or k_total == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    if dout.data_ptr() % 16 or not checks.rows_aligned(dout):
        dout = dout.clone(memory_format=torch.contiguous_format)
    checks.begins_aligned("hopper", q=q, k=k, v=v)
    requests = cu_seqlens_q.shape[0] - 1
    has_rope = d_qk == 192
    slots = k_total // KEYS.value + requests + 2
    blocks = -(-q_total // TOKENS.value)
    tiles_per_head = q_total // QUERIES.value + requests + 2
    dq_sums = torch.empty(heads, q_total, d_qk, dtype=torch.float32, device=q.device)
    row_lse = torch.empty(heads, q_total, dtype=torch.float32, device=q.device)
    delta = torch.empty_like(row_lse)
    semaphores = torch.empty(heads, tiles_per_head, dtype=torch.int32, device=q.device) if deterministic else None
    prepare_kernel[(heads * blocks,)](
        out=out,
        **_strides("out", out),
        dout=dout,
        **_strides("dout", dout),
        lse=lse,
        lse_token_stride=lse.stride(0),
        lse_head_stride=lse.stride(1),
        dlse=dlse,
        dlse_token_stride=0 if dlse is None else dlse.stride(0),
        dlse_head_stride=0 if dlse is None else dlse.stride(1),
        row_lse=row_lse,
        delta=delta,
        dq_sums=dq_sums,
        semaphores=semaphores,
        tokens=q_total,
        heads=heads,
        tiles_per_head=tiles_per_head,
        OUT_ALIGN=row_align(out),
        DOUT_ALIGN=row_align(dout),
        V_DIM=d_v,
        QK_DIM=d_qk,
        num_warps=4,
    )
    q_main, k_main = _descriptor(q, 128), _descriptor(k, 128)
    backward_kernel[(slots * kv_heads,)](
        q_main=q_main,
        q_rope=_descriptor(q, 64) if has_rope else q_main,
        q=q,
        **_strides("q", q),
        dout_desc=_descriptor(dout, 128),
        dout=dout,
        **_strides("dout", dout),
        k_main=k_main,
        k_rope=_descriptor(k, 64) if has_rope else k_main,
        k=k,
        **_strides("k", k),
        v_desc=_descriptor(v, 128),
        v=v,
        **_strides("v", v),
        lse=row_lse,
        delta=delta,
        dq_sums=TensorDescriptor.from_tensor(dq_sums, [1, QUERIES.value, SUM_COLUMNS.value], _SUMS_LAYOUT),
        dq_semaphores=semaphores,
        dk=dk,
        **_strides("dk", dk),
        dv=dv,
        **_strides("dv", dv),
        cu_q=cu_seqlens_q,
        cu_k=cu_seqlens_k,
        q_total=q_total,
        k_total=k_total,
        requests=requests,
        bisections=(requests + 1).bit_length(),
        slots=slots,
        tiles_per_head=tiles_per_head,
        group=heads // kv_heads,
        window_left=window_left,
        window_right=window_right,
        scale_log2=softmax_scale * math.log2(math.e),
        HAS_ROPE=has_rope,
        DK_ALIGN=row_align(dk),
        DV_ALIGN=row_align(dv),
        num_warps=4,
    )
    finish_kernel[(heads * blocks,)](
        dq_sums=dq_sums,
        dq=dq,
        **_strides("dq", dq),
        tokens=q_total,
        heads=heads,
        softmax_scale=softmax_scale,
        DQ_ALIGN=row_align(dq),
        QK_DIM=d_qk,
        num_warps=4,
    )


def _strides(name: str, x: torch.Tensor) -> dict[str, int]:
    """Strides of tokens and heads under the kernel's parameter names, in units of ``row_align``; arbitrary for an axis
    of size 1."""
    align = row_align(x)
    return {f"{name}_token_stride": x.stride(0) // align, f"{name}_head_stride": x.stride(1) // align}


def _descriptor(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """TMA descriptor of tiles of 64 tokens of a head: axes head, token, column."""
    tokens, heads, width = x.shape
    token_stride, head_stride = strides_in_use(x)
    return describe(x, (heads, tokens, width), (head_stride, token_stride), (1, QUERIES.value, columns))
