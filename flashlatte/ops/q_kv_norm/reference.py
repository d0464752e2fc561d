"""``q_kv_norm`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch


def q_kv_norm(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    kv_out: torch.Tensor,
) -> None:
    for x, weight, out in ((q, q_weight, q_out), (kv, kv_weight, kv_out)):
        x = x.float()
        out.copy_(x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float())
