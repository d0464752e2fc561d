"""Exact top-k over keys that are spread over ranks: each rank's own k, gathered with their values, chosen again."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flashlatte.distributed import collectives
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.ops.topk import topk


def global_topk(
    logits: torch.Tensor,
    k: int,
    local_lengths: torch.Tensor,
    sharding: Sharding,
    group: dist.ProcessGroup,
    backend: str | None,
) -> torch.Tensor:
    """``ContextParallel.topk``, without its checks: int32 [rows, k] of logits [rows, width] of this rank's keys.

    Whatever is among the k best of all is among the k best of its rank. Of equal values the lower token comes first,
    on a rank as over all: the order of a rank's keys is that of the request, and the gathered candidates are put into
    that order before they are chosen from.
    """
    columns, values = topk(logits, k, end=local_lengths, return_values=True, backend=backend)
    mine = torch.stack([sharding.global_positions(columns), values.view(torch.int32)])
    gathered = collectives.all_gather(mine, group).unflatten(0, (sharding.size, 2))
    positions, bits = gathered.permute(1, 2, 0, 3).flatten(2)  # each [rows, size · k]

    absent = torch.iinfo(torch.int32).max
    positions, order = torch.where(positions >= 0, positions, absent).sort(dim=1)
    candidates = bits.gather(1, order).view(torch.float32)
    found = (positions != absent).sum(dim=1)
    chosen, _ = topk(candidates, k, end=found, return_values=True, backend=backend)
    return torch.where(chosen >= 0, positions.gather(1, chosen.clamp_min(0).long()), -1)
