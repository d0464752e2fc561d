"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format


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
