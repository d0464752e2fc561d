"""Launches of the forward and backward kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from flashlatte.kernels.triton.head_dims import padded, tile_widths
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.kernels.triton.ragged_tiles import tile_slots
from flashlatte.ops.dense_prefill.portable.backward import keys_kernel, queries_kernel, row_sums_kernel
from flashlatte.ops.dense_prefill.portable.config import PrefillConfig, PrefillConfigs, choose
from flashlatte.ops.dense_prefill.portable.forward import forward_kernel
from flashlatte.runtime.arguments import by_name

_ROW_SUMS_BLOCK = 64
# Classes of GPUs on which the forward loop applies masks in a branch. On others, Triton then does not detect the chain
# of two MMAs, and splits rows of P over several warps.
_BRANCHING = frozenset({"hopper", "blackwell", "interpreter"})


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    empty_lse: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    total_q, heads, head_dim = q.shape
    if total_q == 0:
        return
    align, tensors = _by_name(q=q, k=k, v=v, out=out)
    gpu = gpu_class(q.device)
    configs, constants = _compiled_for(gpu, head_dim, v.shape[2], align > 1)
    requests = cu_seqlens_q.shape[0] - 1
    slots = tile_slots(total_q, requests, configs.forward.block_m)
    forward_kernel[(slots * heads,)](
        *by_name(
            forward_kernel,
            **tensors,
            lse=lse,
            lse_stride_token=lse.stride(0),
            lse_stride_head=lse.stride(1),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            requests=requests,
            total_q=total_q,
            total_k=k.shape[0],
            slots=slots,
            group=heads // k.shape[1],
            window_left=window_left,
            window_right=window_right,
            softmax_scale=softmax_scale,
            empty_lse=empty_lse,
        ),
        BRANCHES=gpu in _BRANCHING,
        ALIGN=align,
        **constants,
        **_options(configs.forward),
    )


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
    """This implementation is always deterministic."""
    total_q, heads, head_dim = q.shape
    total_k, kv_heads, head_dim_v = v.shape
    gpu = gpu_class(q.device)
    align, tensors = _by_name(q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    configs, constants = _compiled_for(gpu, head_dim, head_dim_v, align > 1)
    requests = cu_seqlens_q.shape[0] - 1
    arguments = tensors | {
        "sums": torch.empty(heads, total_q, 2, dtype=torch.float32, device=q.device),
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "requests": requests,
        "total_q": total_q,
        "total_k": total_k,
        "group": heads // kv_heads,
        "window_left": window_left,
        "window_right": window_right,
        "softmax_scale": softmax_scale,
    }
    if total_q:
        row_sums_kernel[(triton.cdiv(total_q, _ROW_SUMS_BLOCK) * heads,)](
            *by_name(
                row_sums_kernel,
                **arguments,
                lse=lse,
                lse_stride_token=lse.stride(0),
                lse_stride_head=lse.stride(1),
                dlse=dlse,
                dlse_stride_token=0 if dlse is None else dlse.stride(0),
                dlse_stride_head=0 if dlse is None else dlse.stride(1),
                heads=heads,
            ),
            D_V=head_dim_v,
            D_V_PADDED=padded(head_dim_v),
            BLOCK=_ROW_SUMS_BLOCK,
            ALIGN=align,
            INTERPRETED=gpu == "interpreter",
            num_warps=4,
        )
    if total_k:
        slots = tile_slots(total_k, requests, configs.keys.block_n)
        keys_kernel[(slots * kv_heads,)](
            *by_name(keys_kernel, **arguments, slots=slots),
            ALIGN=align,
            **constants,
            **_options(configs.keys),
        )
    if total_q:
        slots = tile_slots(total_q, requests, configs.queries.block_m)
        queries_kernel[(slots * heads,)](
            *by_name(queries_kernel, **arguments, slots=slots),
            ALIGN=align,
            **constants,
            **_options(configs.queries),
        )


@functools.lru_cache(maxsize=64)
def _compiled_for(gpu: str, head_dim: int, head_dim_v: int, aligned: bool) -> tuple[PrefillConfigs, dict[str, Any]]:
    """The configurations for two head dims, and the constants that all kernels share."""
    first, second = tile_widths(head_dim)
    width = padded(head_dim_v)
    return choose(gpu, first + second + width, aligned), {
        "D": head_dim,
        "D_A": first,
        "D_B": second,
        "D_V": head_dim_v,
        "D_V_PADDED": width,
        "INTERPRETED": gpu == "interpreter",
    }


def _options(config: PrefillConfig) -> dict[str, Any]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def _by_name(**tensors: torch.Tensor) -> tuple[int, dict[str, Any]]:
    """The unit of the strides of tokens and heads (16 bytes if all are multiples of it, else one element), and the
    tensors and strides by kernel argument name."""
    unit = 1 if any(stride % 8 for tensor in tensors.values() for stride in tensor.stride()[:2]) else 8
    arguments: dict[str, Any] = {}
    for name, tensor in tensors.items():
        arguments[name] = tensor
        arguments[f"{name}_stride_token"] = tensor.stride(0) // unit
        arguments[f"{name}_stride_head"] = tensor.stride(1) // unit
    return unit, arguments
