"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format


class CompressParams(NamedTuple):
    """The checked arguments of ``api.compress``."""

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    weight: torch.Tensor
    eps: float
    cos_sin: torch.Tensor
    request_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache: torch.Tensor
    cache_format: str
    scale_rounding: str
    state_cache: torch.Tensor | None
    state_table: torch.Tensor | None

    @property
    def layout(self) -> CacheFormat:
        return as_format(self.cache_format, self.weight.shape[0])

    @property
    def ratio(self) -> int:
        """Tokens per group."""
        return self.ape.shape[0]

    @property
    def overlaps(self) -> bool:
        """Whether a row also depends on the preceding group."""
        return self.ape.shape[1] > self.weight.shape[0]
