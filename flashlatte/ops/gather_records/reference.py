"""``gather_records`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.fp8 import as_bytes, raw_view
from flashlatte.ops.gather_records.params import GatherRecordsParams


def gather_records(params: GatherRecordsParams) -> None:
    cache, out = params.cache, raw_view(params.out)
    page_size = cache.shape[1]
    inside, slots = gather_slots.slots_of_rows(
        cache, params.block_table, params.cu_seqlens, params.seq_starts, out.shape[0]
    )
    slot = slots.clamp_min(0)
    planes = [as_bytes(view[slot // page_size, slot % page_size]) for view in params.layout.page_views(cache)]
    records = torch.where((slots >= 0).unsqueeze(-1), torch.cat(planes, dim=-1), 0)
    out[inside] = records[inside].view(out.dtype)
