"""``mhc_pre`` and ``mhc_post`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch


def mhc_pre(
    streams: torch.Tensor,
    projected: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    rms_eps: float,
    eps: float,
    iterations: int,
    shares: torch.Tensor,
    mixture: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    count = streams.shape[1]
    x = streams.float()
    normalised = projected * torch.rsqrt(x.square().mean(dim=(1, 2)) + rms_eps).unsqueeze(1)
    sizes = (count, count, count * count)
    a, b, c = (
        part * factor + offset
        for part, factor, offset in zip(normalised.split(sizes, dim=1), scale, base.split(sizes), strict=True)
    )
    shares.copy_(2 * torch.sigmoid(b))
    mixed = torch.softmax(c.view(-1, count, count), dim=2) + eps
    mixed = mixed / (mixed.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixed = mixed / (mixed.sum(dim=2, keepdim=True) + eps)
        mixed = mixed / (mixed.sum(dim=1, keepdim=True) + eps)
    mixture.copy_(mixed)
    seen.copy_(((torch.sigmoid(a) + eps).unsqueeze(2) * x).sum(dim=1))


def mhc_post(
    result: torch.Tensor, streams: torch.Tensor, shares: torch.Tensor, mixture: torch.Tensor, out: torch.Tensor
) -> None:
    mixed = torch.bmm(mixture.transpose(1, 2), streams.float())
    out.copy_(mixed + shares.unsqueeze(2) * result.float().unsqueeze(1))
