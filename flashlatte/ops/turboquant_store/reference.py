"""``turboquant_store`` in plain PyTorch: the specification. The format encodes the record."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.slots import stored_tokens
from flashlatte.kv_cache.turboquant import TurboQuantFormat


@torch.no_grad()
def turboquant_store(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: TurboQuantFormat
) -> None:
    page_size = cache.shape[1]
    tokens, slots = stored_tokens(slot_mapping, cache)
    cache[slots // page_size, slots % page_size] = layout.encode(key[tokens], value[tokens])
