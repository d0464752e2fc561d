"""Norms and rotation in plain PyTorch."""

from __future__ import annotations

import torch

from flashlatte.kernels.rope import rotate
from flashlatte.kv_cache.slots import stored_tokens


def latent_rows(
    kv_a: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    q_a: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    q_eps: float,
    slot_mapping: torch.Tensor | None,
    rows: torch.Tensor,
    q_out: torch.Tensor | None,
    cache: torch.Tensor | None,
) -> None:
    latent_dim = weight.shape[0]
    rows[:, :latent_dim] = _normalised(kv_a[:, :latent_dim], weight, eps)
    rows[:, latent_dim:] = rotate(kv_a[:, latent_dim:].float(), table, positions, interleaved)
    if q_a is not None and q_weight is not None and q_out is not None:
        q_out.copy_(_normalised(q_a, q_weight, q_eps))
    if cache is not None and slot_mapping is not None:
        tokens, slots = stored_tokens(slot_mapping, cache)
        cache[slots // cache.shape[1], slots % cache.shape[1], 0] = rows[tokens].to(cache.dtype)


def rotate_heads(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool, out: torch.Tensor
) -> None:
    out.copy_(rotate(x.float(), table, positions, interleaved))


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean x² + eps) · weight (RMSNorm, arXiv:1910.07467), float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
