"""``gather_records``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.fp8 import as_bytes, raw_view
from flashlatte.kv_cache.registry import as_format


class GatherRecordsParams(NamedTuple):
    """The checked arguments of ``api.gather_records``."""

    cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_starts: torch.Tensor | None
    cache_format: str
    head_dim: int
    out: torch.Tensor

    @property
    def layout(self) -> CacheFormat:
        return as_format(self.cache_format, self.head_dim)


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
