"""``q_kv_norm`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.ops.q_kv_norm.params import QKvNormParams


def q_kv_norm(params: QKvNormParams) -> None:
    queries = params.q, params.q_weight, params.q_out
    keys = params.kv, params.kv_weight, params.kv_out
    for x, weight, out in (queries, keys):
        x = x.float()
        out.copy_(x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + params.eps) * weight.float())
