"""``cache_gather`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.slots import read_slots
from flashlatte.ops.cache_gather.params import CacheGatherParams


def cache_gather(params: CacheGatherParams) -> None:
    cache, out = params.cache, params.out
    inside, slots = gather_slots.slots_of_rows(
        cache, params.block_table, params.cu_seqlens, params.seq_starts, out.shape[0], params.seq_ends
    )
    scale = params.scale_value if params.scale_tensor is None else params.scale_tensor
    tokens = read_slots(cache, slots, params.layout, scale).to(out.dtype)
    out.copy_(torch.where(inside.unsqueeze(-1), tokens, out))
