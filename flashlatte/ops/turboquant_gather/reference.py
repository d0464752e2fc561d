"""``turboquant_gather`` in plain PyTorch: the specification. The format defines the record."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.turboquant import TurboQuantFormat, turboquant_format


class TurboQuantGatherParams(NamedTuple):
    """The checked arguments of ``api.turboquant_gather``."""

    cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_starts: torch.Tensor | None
    cache_format: str
    key: torch.Tensor
    value: torch.Tensor

    @property
    def layout(self) -> TurboQuantFormat:
        return turboquant_format(self.cache_format, self.key.shape[2])


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
