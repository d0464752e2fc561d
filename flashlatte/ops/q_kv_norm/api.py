"""``q_kv_norm``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.ops.q_kv_norm.reference import QKvNormParams
from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "q_kv_norm"
# Maximum width of a row, which a program holds in registers.
_PORTABLE_MAX_WIDTH = 8192


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refusals.head_dim_above(call, _PORTABLE_MAX_WIDTH)


@repeats_launches
def q_kv_norm(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply an RMSNorm, x / √(mean x² + eps) · weight (arXiv:1910.07467), to the rows of each of two tensors.

    Both may be column ranges of one projection's result. Computed in float32 and rounded once. It has no backward pass,
    and warns once if gradients are enabled and an input requires one.

    Args:
        q, kv: [T, rank] and [T, head_dim], bf16, fp16 or float32, the same for both; last stride 1. T may be 0.
        q_weight, kv_weight: [rank] and [head_dim], bf16, fp16 or float32, the same for both.
        eps: epsilon of both.
        backend: "portable" or "reference"; None selects one.

    Returns:
        q and kv normalized, contiguous, in their dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    checks.tensor("q", q, ("T", "rank"), checks.FLOAT_DTYPES, may_be_empty=1)
    checks.tensor("kv", kv, (q.shape[0], "head_dim"), (q.dtype,), q.device)
    checks.tensor("q_weight", q_weight, (q.shape[1],), checks.FLOAT_DTYPES, q.device)
    checks.tensor("kv_weight", kv_weight, (kv.shape[1],), (q_weight.dtype,), q.device)
    eps = checks.epsilon("eps", eps)
    gradients.warn_if_dropped(OPERATION, q, kv, q_weight, kv_weight)
    width = max(q.shape[1], kv.shape[1])
    backend = dispatch.select(dispatch.CallSpec(OPERATION, q.device, q.dtype, head_dim=width), backend)
    q_out, kv_out = torch.empty(q.shape, dtype=q.dtype, device=q.device), kv.new_empty(kv.shape)
    if q.shape[0]:
        params = QKvNormParams(q=q, kv=kv, q_weight=q_weight, kv_weight=kv_weight, eps=eps, q_out=q_out, kv_out=kv_out)
        _q_kv_norm(params, backend)
    return q_out, kv_out


@register_op(OPERATION, mutates=("q_out", "kv_out"))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _q_kv_norm(params: QKvNormParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.q_kv_norm.portable import q_kv_norm
    else:
        from flashlatte.ops.q_kv_norm.reference import q_kv_norm

    q_kv_norm(params)
