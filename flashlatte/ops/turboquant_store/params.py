"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.turboquant import TurboQuantFormat, turboquant_format


class TurboQuantStoreParams(NamedTuple):
    """The checked arguments of ``api.turboquant_store``."""

    key: torch.Tensor
    value: torch.Tensor
    cache: torch.Tensor
    slot_mapping: torch.Tensor
    cache_format: str

    @property
    def layout(self) -> TurboQuantFormat:
        return turboquant_format(self.cache_format, self.key.shape[2])
