"""``rope_cache_write`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kernels.rope import rotate
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
    for rope in (k_rope, q_rope):
        if rope is not None:
            rope[:count] = rotate(rope[:count].float(), cos_sin, positions[:count], interleaved).to(rope.dtype)
    tokens, slots = stored_tokens(slot_mapping, cache)
    scale = scale_value if scale_tensor is None else scale_tensor
    planes = layout.encode(latent[tokens], k_rope[tokens], scale, "power_of_two")
    write_slots(cache, slots, planes, layout)
