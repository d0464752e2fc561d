"""``turboquant_store`` in plain PyTorch: the specification. The format encodes the record."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.slots import stored_tokens
from flashlatte.ops.turboquant_store.params import TurboQuantStoreParams


@torch.no_grad()
def turboquant_store(params: TurboQuantStoreParams) -> None:
    cache = params.cache
    page_size = cache.shape[1]
    tokens, slots = stored_tokens(params.slot_mapping, cache)
    cache[slots // page_size, slots % page_size] = params.layout.encode(params.key[tokens], params.value[tokens])
