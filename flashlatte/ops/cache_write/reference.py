"""``cache_write`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.codec import split_rows
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.slots import stored_tokens, write_slots


def cache_write(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    x: torch.Tensor,
    rope: torch.Tensor | None,
    layout: CacheFormat,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
    scale_rounding: str,
) -> None:
    tokens, slots = stored_tokens(slot_mapping, cache)
    latent, rope = split_rows(layout, x[tokens], None if rope is None else rope[tokens])
    scale = scale_value if scale_tensor is None else scale_tensor
    planes = layout.encode(latent, rope, scale, scale_rounding)
    write_slots(cache, slots, planes, layout)
