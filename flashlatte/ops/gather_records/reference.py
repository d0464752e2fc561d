"""``gather_records`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.fp8 import as_bytes, raw_view


def gather_records(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    layout: CacheFormat,
    out: torch.Tensor,
) -> None:
    page_size = cache.shape[1]
    inside, slots = gather_slots.slots_of_rows(cache, block_table, cu_seqlens, seq_starts, out.shape[0])
    slot = slots.clamp_min(0)
    planes = [as_bytes(view[slot // page_size, slot % page_size]) for view in layout.page_views(cache)]
    records = torch.where((slots >= 0).unsqueeze(-1), torch.cat(planes, dim=-1), 0)
    out = raw_view(out)
    out[inside] = records[inside].view(out.dtype)
