"""``cache_gather``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format
from flashlatte.kv_cache.slots import read_slots


class CacheGatherParams(NamedTuple):
    """The checked arguments of ``api.cache_gather``; the scale is ``scale_value`` if ``scale_tensor`` is None."""

    cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_starts: torch.Tensor | None
    seq_ends: torch.Tensor | None
    cache_format: str
    head_dim: int
    scale_tensor: torch.Tensor | None
    scale_value: float
    out: torch.Tensor

    @property
    def layout(self) -> CacheFormat:
        return as_format(self.cache_format, self.head_dim)


def cache_gather(params: CacheGatherParams) -> None:
    cache, out = params.cache, params.out
    inside, slots = gather_slots.slots_of_rows(
        cache, params.block_table, params.cu_seqlens, params.seq_starts, out.shape[0], params.seq_ends
    )
    scale = params.scale_value if params.scale_tensor is None else params.scale_tensor
    tokens = read_slots(cache, slots, params.layout, scale).to(out.dtype)
    out.copy_(torch.where(inside.unsqueeze(-1), tokens, out))
