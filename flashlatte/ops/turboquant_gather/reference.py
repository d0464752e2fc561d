"""``turboquant_gather`` in plain PyTorch: the specification. The format defines the record."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.ops.turboquant_gather.params import TurboQuantGatherParams


@torch.no_grad()
def turboquant_gather(params: TurboQuantGatherParams) -> None:
    cache, key, value = params.cache, params.key, params.value
    page_size = cache.shape[1]
    inside, slots = gather_slots.slots_of_rows(
        cache, params.block_table, params.cu_seqlens, params.seq_starts, key.shape[0]
    )
    slot = slots.clamp_min(0)
    found = (slots >= 0)[:, None, None]
    decoded = params.layout.decode(cache[slot // page_size, slot % page_size])
    for rows, out in zip(decoded, (key, value), strict=True):
        out[inside] = torch.where(found, rows, 0.0)[inside].to(out.dtype)
