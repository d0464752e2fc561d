"""``mhc_pre`` and ``mhc_post``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class MhcPreParams(NamedTuple):
    """The checked arguments of ``api.mhc_pre``, and its results."""

    streams: torch.Tensor
    projected: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    rms_eps: float
    eps: float
    iterations: int
    shares: torch.Tensor
    mixture: torch.Tensor
    layer_input: torch.Tensor


def mhc_pre(params: MhcPreParams) -> None:
    x, eps = params.streams.float(), params.eps
    count = x.shape[1]
    normalized = params.projected * torch.rsqrt(x.square().mean(dim=(1, 2)) + params.rms_eps).unsqueeze(1)
    sizes = (count, count, count * count)
    a, b, c = (
        part * factor + offset
        for part, factor, offset in zip(
            normalized.split(sizes, dim=1), params.scale, params.base.split(sizes), strict=True
        )
    )
    params.shares.copy_(2 * torch.sigmoid(b))
    mixed = torch.softmax(c.view(-1, count, count), dim=2) + eps
    mixed = mixed / (mixed.sum(dim=1, keepdim=True) + eps)
    for _ in range(params.iterations - 1):
        mixed = mixed / (mixed.sum(dim=2, keepdim=True) + eps)
        mixed = mixed / (mixed.sum(dim=1, keepdim=True) + eps)
    params.mixture.copy_(mixed)
    params.layer_input.copy_(((torch.sigmoid(a) + eps).unsqueeze(2) * x).sum(dim=1))


def mhc_post(
    result: torch.Tensor, streams: torch.Tensor, shares: torch.Tensor, mixture: torch.Tensor, out: torch.Tensor
) -> None:
    mixed = torch.bmm(mixture.transpose(1, 2), streams.float())
    out.copy_(mixed + shares.unsqueeze(2) * result.float().unsqueeze(1))
