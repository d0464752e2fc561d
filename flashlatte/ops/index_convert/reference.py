"""``index_convert``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flashlatte.kv_cache.sharding import Sharding
from flashlatte.kv_cache.slots import slots_in_table


class IndexConvertParams(NamedTuple):
    """The checked arguments of ``api.index_convert``: ``sharding`` has the fields of a ``Sharding``; ``counts`` is None
    if they are not returned."""

    indices: torch.Tensor | None
    block_table: torch.Tensor
    page_size: int
    request_ids: torch.Tensor | None
    next_n: int
    query_positions: torch.Tensor | None
    sinks: int
    window: int
    workspace_ids: torch.Tensor | None
    workspace_starts: torch.Tensor | None
    sharding: Sequence[int]
    compact: bool
    slots: torch.Tensor
    counts: torch.Tensor | None


def index_convert(params: IndexConvertParams) -> None:
    block_table, page_size, slots = params.block_table, params.page_size, params.slots
    request_ids, workspace_ids, workspace_starts = params.request_ids, params.workspace_ids, params.workspace_starts
    position = _positions(params)
    row = torch.arange(slots.shape[0], device=slots.device)
    request = row // params.next_n if request_ids is None else request_ids.long()

    local = Sharding(*params.sharding).local_positions(position)  # -1 for tokens of other ranks
    slot, valid = slots_in_table(local, block_table, page_size, request, slots.dtype)
    if workspace_ids is not None and workspace_starts is not None:
        workspace = workspace_ids.long().unsqueeze(1)
        count = workspace_starts.shape[0]
        known = workspace < count
        begins = workspace_starts[workspace.clamp(0, count - 1)].long()
        in_workspace = workspace >= 0
        slot = torch.where(in_workspace, begins + position, slot)
        valid = torch.where(in_workspace, (position >= 0) & known, valid)
    slot = slot.where(valid & (slot >= 0) & (slot <= torch.iinfo(slots.dtype).max), -1)
    if params.compact:
        slot = slot.gather(1, (slot < 0).to(torch.int8).sort(dim=1, stable=True).indices)
    slots.copy_(slot)
    if params.counts is not None:
        params.counts.copy_((slot >= 0).sum(dim=1))


def _positions(params: IndexConvertParams) -> torch.Tensor:
    """int64 [rows, sinks + window + indices]: sinks, the window, then the indices that are in neither; -1 for none."""
    sinks, window, device = params.sinks, params.window, params.slots.device
    parts = []
    if params.query_positions is not None:
        query = params.query_positions.long().unsqueeze(1)
        first = torch.arange(sinks, device=device).expand(query.shape[0], -1)
        recent = query - window + 1 + torch.arange(window, device=device)
        parts.append(first.where(first <= query, -1))
        parts.append(recent.where((recent >= sinks) & (query >= 0), -1))
    if params.indices is not None:
        chosen = params.indices.long()
        if params.query_positions is not None:
            twice = (chosen <= query) & ((chosen < sinks) | (chosen > query - window))
            chosen = chosen.masked_fill(twice, -1)
        parts.append(chosen)
    return torch.cat(parts, dim=1)
