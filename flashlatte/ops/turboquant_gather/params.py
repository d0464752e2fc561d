"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.turboquant import TurboQuantFormat, turboquant_format


class TurboQuantGatherParams(NamedTuple):
    """The checked arguments of ``api.turboquant_gather``."""

    cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_starts: torch.Tensor | None
    cache_format: str
    key: torch.Tensor
    value: torch.Tensor

    @property
    def layout(self) -> TurboQuantFormat:
        return turboquant_format(self.cache_format, self.key.shape[2])
