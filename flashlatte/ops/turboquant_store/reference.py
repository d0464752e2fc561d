"""``turboquant_store`` in plain PyTorch: the specification. The format encodes the record."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.slots import stored_tokens
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


@torch.no_grad()
def turboquant_store(params: TurboQuantStoreParams) -> None:
    cache = params.cache
    page_size = cache.shape[1]
    tokens, slots = stored_tokens(params.slot_mapping, cache)
    cache[slots // page_size, slots % page_size] = params.layout.encode(params.key[tokens], params.value[tokens])
