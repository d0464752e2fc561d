"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format


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
