"""The arguments of an implementation of ``compress``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.formats import CacheFormat


@dataclass(frozen=True)
class CompressArgs:
    """The arguments of ``compress``, checked; ``cache`` and ``state_cache`` are written to."""

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
    layout: CacheFormat
    scale_rounding: str
    state_cache: torch.Tensor | None
    state_table: torch.Tensor | None

    @property
    def ratio(self) -> int:
        """Tokens per group."""
        return self.ape.shape[0]

    @property
    def overlaps(self) -> bool:
        """Whether a row also depends on the preceding group."""
        return self.ape.shape[1] > self.weight.shape[0]
