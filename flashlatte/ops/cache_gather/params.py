"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format


class CacheGatherParams(NamedTuple):
    """The checked arguments of ``api.cache_gather``; the scale is ``scale_value`` if ``scale_tensor`` is None."""

    cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_starts: torch.Tensor | None
    seq_ends: torch.Tensor | None
    cache_format: str
    head_dim: int
    scale_tensor: torch.Tensor | None
    scale_value: float
    out: torch.Tensor

    @property
    def layout(self) -> CacheFormat:
        return as_format(self.cache_format, self.head_dim)
