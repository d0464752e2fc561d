"""``rope_cache_write``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels.rope import rotate
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format
from flashlatte.kv_cache.slots import stored_tokens, write_slots


class RopeCacheWriteParams(NamedTuple):
    """The checked arguments of ``api.rope_cache_write``; the scale is ``scale_value`` if ``scale_tensor`` is None."""

    cache: torch.Tensor
    slot_mapping: torch.Tensor
    latent: torch.Tensor
    k_rope: torch.Tensor
    q_rope: torch.Tensor | None
    positions: torch.Tensor
    cos_sin: torch.Tensor
    interleaved: bool
    cache_format: str
    head_dim: int
    scale_tensor: torch.Tensor | None
    scale_value: float

    @property
    def layout(self) -> CacheFormat:
        return as_format(self.cache_format, self.head_dim)


def rope_cache_write(params: RopeCacheWriteParams) -> None:
    layout, count = params.layout, params.slot_mapping.shape[0]
    for rope in (params.k_rope, params.q_rope):
        if rope is not None:
            rotated = rotate(rope[:count].float(), params.cos_sin, params.positions[:count], params.interleaved)
            rope[:count] = rotated.to(rope.dtype)
    tokens, slots = stored_tokens(params.slot_mapping, params.cache)
    scale = params.scale_value if params.scale_tensor is None else params.scale_tensor
    planes = layout.encode(params.latent[tokens], params.k_rope[tokens], scale, "power_of_two")
    write_slots(params.cache, slots, planes, layout)
