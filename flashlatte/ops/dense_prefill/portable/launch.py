"""Launches of the forward and backward kernels."""

from __future__ import annotations

import functools

import torch

from flashlatte.kernels.triton.cache_layout import cdiv
from flashlatte.kernels.triton.config import padded, tile_widths
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.kernels.triton.ragged_tiles import tile_slots
from flashlatte.kernels.triton.rows import Window, head_rows
from flashlatte.ops.dense_prefill.portable.backward import keys_kernel, queries_kernel, row_sums_kernel
from flashlatte.ops.dense_prefill.portable.config import PrefillConfig, choose
from flashlatte.ops.dense_prefill.portable.forward import forward_kernel
from flashlatte.ops.dense_prefill.portable.tiles import DensePrefillStep
from flashlatte.ops.dense_prefill.reference import DensePrefillGradients, DensePrefillParams, requests_of

_ROW_SUMS_BLOCK = 64
# Classes of GPUs on which the forward loop applies masks in a branch. On others, Triton then does not detect the chain
# of two MMAs, and splits rows of P over several warps.
_BRANCHING = frozenset({"hopper", "blackwell", "interpreter"})


def forward(params: DensePrefillParams, out: torch.Tensor, lse: torch.Tensor) -> None:
    q, k, v = params.q, params.k, params.v
    total_q, heads, _ = q.shape
    if total_q == 0:
        return
    align = _align(q, k, v, out)
    config, step = _steps(gpu_class(q.device), q.shape[2], v.shape[2], align > 1)["forward"]
    requests = requests_of(params)
    slots = tile_slots(total_q, requests.count, config.block_m)
    forward_kernel[(slots * heads,)](
        *(head_rows(rows, align) for rows in (q, k, v, out)),
        head_rows(lse, 1),
        requests,
        Window(params.window_left, params.window_right),
        slots=slots,
        group=heads // k.shape[1],
        softmax_scale=params.softmax_scale,
        empty_lse=params.empty_lse,
        STEP=step,
        num_warps=config.num_warps,
    )


def backward(params: DensePrefillParams, gradients: DensePrefillGradients) -> None:
    """This implementation is always deterministic."""
    out, lse, dout, dlse, _, dq, dk, dv = gradients
    total_q, heads, head_dim = params.q.shape
    total_k, kv_heads, head_dim_v = params.v.shape
    align = _align(params.q, params.k, params.v, out, dout, dq, dk, dv)
    gpu = gpu_class(params.q.device)
    steps = _steps(gpu, head_dim, head_dim_v, align > 1)
    requests, window = requests_of(params), Window(params.window_left, params.window_right)
    sums = torch.empty(heads, total_q, 2, dtype=torch.float32, device=params.q.device)
    inputs = [head_rows(rows, align) for rows in (params.q, params.k, params.v, dout)]
    others = {"sums": sums, "group": heads // kv_heads, "softmax_scale": params.softmax_scale}
    if total_q:
        row_sums_kernel[(cdiv(total_q, _ROW_SUMS_BLOCK) * heads,)](
            head_rows(out, align),
            head_rows(dout, align),
            head_rows(lse, 1),
            head_rows(dlse, 1),
            sums=sums,
            total_q=total_q,
            heads=heads,
            D_V=head_dim_v,
            WIDTH_V=padded(head_dim_v),
            BLOCK=_ROW_SUMS_BLOCK,
            num_warps=4,
        )
    if total_k:
        config, step = steps["keys"]
        slots = tile_slots(total_k, requests.count, config.block_n)
        of_keys = head_rows(dk, align), head_rows(dv, align)
        keys_kernel[(slots * kv_heads,)](
            *inputs, *of_keys, requests, window, slots=slots, STEP=step, num_warps=config.num_warps, **others
        )
    if total_q:
        config, step = steps["queries"]
        slots = tile_slots(total_q, requests.count, config.block_m)
        dq_rows = head_rows(dq, align)
        queries_kernel[(slots * heads,)](
            *inputs, dq_rows, requests, window, slots=slots, STEP=step, num_warps=config.num_warps, **others
        )


@functools.lru_cache(maxsize=64)
def _steps(
    gpu: str, head_dim: int, head_dim_v: int, aligned: bool
) -> dict[str, tuple[PrefillConfig, DensePrefillStep]]:
    """The configuration and the constants of each kernel."""
    first, rest = tile_widths(head_dim)
    width = padded(head_dim_v)
    configs = choose(gpu, first + rest + width, aligned)
    return {
        name: (
            config,
            DensePrefillStep(
                head_dim=head_dim,
                first=first,
                rest=rest,
                head_dim_v=head_dim_v,
                width_v=width,
                block_m=config.block_m,
                block_n=config.block_n,
                num_stages=config.num_stages,
                branches=name == "forward" and gpu in _BRANCHING,
            ),
        )
        for name, config in (("forward", configs.forward), ("keys", configs.keys), ("queries", configs.queries))
    }


def _align(*tensors: torch.Tensor) -> int:
    """The unit of the strides of tokens and heads: 16 bytes if all are multiples of it, else one element."""
    return 1 if any(stride % 8 for tensor in tensors for stride in tensor.stride()[:2]) else 8
