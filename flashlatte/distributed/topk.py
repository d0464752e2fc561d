"""Exact top-k over sharded keys: top-k on each rank, then top-k of the gathered candidates."""

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
    """``ContextParallel.topk`` without its checks: int32 [rows, k] for logits [rows, width] of this rank's keys.

    The global top-k is a subset of the ranks' top-k. Of equal values, the lower position is selected, on each rank and
    globally: a rank's keys are in order of position, and candidates are sorted by position before the second top-k.
    """
    columns, values = topk(logits, k, end=local_lengths, return_values=True, backend=backend)
    local = torch.stack([sharding.global_positions(columns), values.view(torch.int32)])
    gathered = collectives.all_gather(local, group).unflatten(0, (sharding.size, 2))
    positions, bits = gathered.permute(1, 2, 0, 3).flatten(2)  # each [rows, size · k]

    absent = torch.iinfo(torch.int32).max
    positions, order = torch.where(positions >= 0, positions, absent).sort(dim=1)
    candidates = bits.gather(1, order).view(torch.float32)
    found = (positions != absent).sum(dim=1)
    selected, _ = topk(candidates, k, end=found, return_values=True, backend=backend)
    return torch.where(selected >= 0, positions.gather(1, selected.clamp_min(0).long()), -1)
