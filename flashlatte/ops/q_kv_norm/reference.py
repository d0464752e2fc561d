"""``q_kv_norm``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class QKvNormParams(NamedTuple):
    """The checked arguments of ``api.q_kv_norm``, and its results."""

    q: torch.Tensor
    kv: torch.Tensor
    q_weight: torch.Tensor
    kv_weight: torch.Tensor
    eps: float
    q_out: torch.Tensor
    kv_out: torch.Tensor


def q_kv_norm(params: QKvNormParams) -> None:
    queries = params.q, params.q_weight, params.q_out
    keys = params.kv, params.kv_weight, params.kv_out
    for x, weight, out in (queries, keys):
        x = x.float()
        out.copy_(x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + params.eps) * weight.float())
