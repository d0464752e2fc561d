"""``turboquant_gather`` in plain PyTorch: the specification. The format defines the record."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.turboquant import TurboQuantFormat


@torch.no_grad()
def turboquant_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    layout: TurboQuantFormat,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    page_size = cache.shape[1]
    inside, slots = gather_slots.slots_of_rows(cache, block_table, cu_seqlens, seq_starts, key.shape[0])
    slot = slots.clamp_min(0)
    found = (slots >= 0)[:, None, None]
    for rows, out in zip(layout.decode(cache[slot // page_size, slot % page_size]), (key, value), strict=True):
        out[inside] = torch.where(found, rows, 0.0)[inside].to(out.dtype)
