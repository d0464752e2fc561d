"""``latent_rows`` and ``rotate_heads``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels.rope import rotate
from flashlatte.kv_cache.slots import stored_tokens


class LatentRowsParams(NamedTuple):
    """The checked arguments of ``api.latent_rows``, and its results."""

    kv_a: torch.Tensor
    weight: torch.Tensor
    eps: float
    table: torch.Tensor
    positions: torch.Tensor
    interleaved: bool
    q_a: torch.Tensor | None
    q_weight: torch.Tensor | None
    q_eps: float
    slot_mapping: torch.Tensor | None
    rows: torch.Tensor
    q_out: torch.Tensor | None
    cache: torch.Tensor | None


def latent_rows(params: LatentRowsParams) -> None:
    kv_a, rows, cache = params.kv_a, params.rows, params.cache
    latent_dim = params.weight.shape[0]
    rows[:, :latent_dim] = _normalized(kv_a[:, :latent_dim], params.weight, params.eps)
    rows[:, latent_dim:] = rotate(kv_a[:, latent_dim:].float(), params.table, params.positions, params.interleaved)
    if params.q_a is not None and params.q_weight is not None and params.q_out is not None:
        params.q_out.copy_(_normalized(params.q_a, params.q_weight, params.q_eps))
    if cache is not None and params.slot_mapping is not None:
        tokens, slots = stored_tokens(params.slot_mapping, cache)
        cache[slots // cache.shape[1], slots % cache.shape[1], 0] = rows[tokens].to(cache.dtype)


def rotate_heads(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool, out: torch.Tensor
) -> None:
    out.copy_(rotate(x.float(), table, positions, interleaved))


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean x² + eps) · weight (RMSNorm, arXiv:1910.07467), float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
