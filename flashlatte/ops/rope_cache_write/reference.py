"""``rope_cache_write`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.slots import stored_tokens, write_slots


def rope_cache_write(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    q_rope: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    layout: CacheFormat,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
) -> None:
    count = slot_mapping.shape[0]
    rotation = cos_sin[positions[:count].long().clamp(0, cos_sin.shape[0] - 1)].float()
    for rope in (k_rope, q_rope):
        if rope is not None:
            rope[:count] = _rotated(rope[:count], rotation, interleaved).to(rope.dtype)
    tokens, slots = stored_tokens(slot_mapping, cache)
    scale = scale_value if scale_tensor is None else scale_tensor
    planes = layout.encode(latent[tokens], k_rope[tokens], scale, "power_of_two")
    write_slots(cache, slots, planes, layout)


def _rotated(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """float32 x [n, …, rope_dim] with each pair (a, b) as (a cos - b sin, b cos + a sin)."""
    cosine, sine = rotation.view(rotation.shape[0], *[1] * (x.dim() - 2), rotation.shape[1]).chunk(2, dim=-1)
    x = x.float()
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = a * cosine - b * sine, b * cosine + a * sine
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
