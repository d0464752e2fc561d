"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.turboquant import TurboQuantFormat, turboquant_format


class TurboQuantDecodeParams(NamedTuple):
    """The checked arguments of ``api.turboquant_decode``."""

    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cache_format: str
    softmax_scale: float
    causal: bool
    empty_lse: float
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def layout(self) -> TurboQuantFormat:
        return turboquant_format(self.cache_format, self.q.shape[3])
