"""``cache_write``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.codec import split_rows
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format
from flashlatte.kv_cache.slots import stored_tokens, write_slots


class CacheWriteParams(NamedTuple):
    """The checked arguments of ``api.cache_write``; the scale is ``scale_value`` if ``scale_tensor`` is None."""

    cache: torch.Tensor
    slot_mapping: torch.Tensor
    x: torch.Tensor
    rope: torch.Tensor | None
    cache_format: str
    head_dim: int
    scale_tensor: torch.Tensor | None
    scale_value: float
    scale_rounding: str

    @property
    def layout(self) -> CacheFormat:
        return as_format(self.cache_format, self.head_dim)


def cache_write(params: CacheWriteParams) -> None:
    layout, rope = params.layout, params.rope
    tokens, slots = stored_tokens(params.slot_mapping, params.cache)
    latent, rope = split_rows(layout, params.x[tokens], None if rope is None else rope[tokens])
    scale = params.scale_value if params.scale_tensor is None else params.scale_tensor
    write_slots(params.cache, slots, layout.encode(latent, rope, scale, params.scale_rounding), layout)
