"""``cache_gather`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.slots import read_slots


def cache_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    layout: CacheFormat,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
    out: torch.Tensor,
    seq_ends: torch.Tensor | None = None,
) -> None:
    inside, slots = gather_slots.slots_of_rows(cache, block_table, cu_seqlens, seq_starts, out.shape[0], seq_ends)
    scale = scale_value if scale_tensor is None else scale_tensor
    tokens = read_slots(cache, slots, layout, scale).to(out.dtype)
    out.copy_(torch.where(inside.unsqueeze(-1), tokens, out))
