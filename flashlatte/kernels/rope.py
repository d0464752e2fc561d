"""Rotary embedding in plain PyTorch for the reference implementations, and the validation of its table."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """float32 x [T, ..., rope_dim] with each pair (a, b) as (a cos - b sin, b cos + a sin).

    Args:
        cos_sin: [n, rope_dim], the cosines of all frequencies, then the sines.
        positions: int [T], the table row of each token, clamped to the table.
        interleaved: pairs are elements 2i and 2i + 1; otherwise i and i + rope_dim / 2.
    """
    row = cos_sin[positions.long().clamp(0, cos_sin.shape[0] - 1)].float()
    cosine, sine = row.view(row.shape[0], *[1] * (x.dim() - 2), row.shape[1]).chunk(2, dim=-1)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    rotated = a * cosine - b * sine, b * cosine + a * sine
    return torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)


def rotate_tail(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """Apply ``rotate`` to the last rope_dim elements of float32 x [T, ..., d], in interleaved pairs; ``inverse``
    rotates back."""
    if inverse:
        cosines, sines = cos_sin.chunk(2, dim=-1)
        cos_sin = torch.cat((cosines, -sines), dim=-1)
    rest, tail = x.split((x.shape[-1] - cos_sin.shape[1], cos_sin.shape[1]), dim=-1)
    return torch.cat((rest, rotate(tail, cos_sin, positions, interleaved=True)), dim=-1)


def check_rotation(
    cos_sin: torch.Tensor, positions: torch.Tensor, tokens: int, head_dim: int, device: torch.device
) -> None:
    """Check a contiguous float32 table [n, rope_dim] for rows of ``head_dim`` elements, and positions [tokens]."""
    checks.tensor("cos_sin", cos_sin, ("n", "rope_dim"), (torch.float32,), device)
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_dim or not cos_sin.is_contiguous():
        raise ValueError(
            f"cos_sin must be contiguous and have an even width of at most {head_dim}, got shape "
            f"{list(cos_sin.shape)} with strides {cos_sin.stride()}"
        )
    checks.indices("positions", positions, (tokens,), device)
