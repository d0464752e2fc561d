"""Rotary embedding of rows' last numbers, neighbours in pairs, in plain PyTorch; and the check of its table."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks


def rotate_tail(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """float32 x [T, ..., d] with each pair (a, b) of its last rope_dim numbers as (a cos - b sin, b cos + a sin).

    ``cos_sin`` [n, rope_dim] has cosines, then sines; a position outside it takes the nearest row. ``inverse`` turns
    back.
    """
    row = cos_sin[positions.long().clamp(0, cos_sin.shape[0] - 1)]
    cosine, sine = row.view(row.shape[0], *[1] * (x.dim() - 2), row.shape[1]).chunk(2, dim=-1)
    if inverse:
        sine = -sine
    rest, tail = x.split((x.shape[-1] - cos_sin.shape[1], cos_sin.shape[1]), dim=-1)
    a, b = tail[..., 0::2], tail[..., 1::2]
    return torch.cat((rest, torch.stack((a * cosine - b * sine, b * cosine + a * sine), dim=-1).flatten(-2)), dim=-1)


def check_table(cos_sin: torch.Tensor, head_dim: int, device: torch.device) -> None:
    """``cos_sin`` is float32 [n, rope_dim], contiguous, for rows of ``head_dim``."""
    checks.tensor("cos_sin", cos_sin, ("n", "rope_dim"), (torch.float32,), device)
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_dim or not cos_sin.is_contiguous():
        raise ValueError(
            f"cos_sin must be contiguous and have an even width of at most {head_dim}, got shape "
            f"{list(cos_sin.shape)} with strides {cos_sin.stride()}"
        )
