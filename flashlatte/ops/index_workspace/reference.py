"""``index_workspace``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class IndexWorkspaceParams(NamedTuple):
    """The checked arguments of ``api.index_workspace``."""

    indices: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    gather_lens: torch.Tensor | None
    topk: int
    window: int
    ratio: int
    workspace_rows: int
    window_row: int
    rows: torch.Tensor
    counts: torch.Tensor


def index_workspace(params: IndexWorkspaceParams) -> None:
    seq_lens, gather_lens, rows = params.seq_lens, params.gather_lens, params.rows
    device = rows.device
    starts = params.cu_seqlens_q.long() - params.cu_seqlens_q[0]
    token = torch.arange(rows.shape[0], device=device)
    request = torch.searchsorted(starts, token, right=True) - 1
    known = (request >= 0) & (request < seq_lens.shape[0])
    request = request.clamp(0, seq_lens.shape[0] - 1)
    length = seq_lens.long().clamp_min(0)[request]  # no difference wraps round
    position = (length - starts[request + 1] + token).where(known, -1)[:, None]
    known = known & (position[:, 0] >= 0)
    gathered = length if gather_lens is None else gather_lens.long()[request]

    groups = ((position + 1) // params.ratio).clamp(0, params.topk).where(known[:, None], 0)
    seen = (position + 1).clamp(0, params.window).where(known[:, None], 0)
    column = torch.arange(rows.shape[1], device=device)
    chosen = column.expand_as(rows)
    if params.indices is not None:
        chosen = params.indices.long().gather(1, column.clamp_max(params.topk - 1).expand_as(rows))
    recent = position + 1 - seen + column - groups
    at = recent - (length - gathered)[:, None]
    workspace_row = torch.where(column < groups, chosen, params.window_row + at)
    valid = torch.where(column < groups, chosen >= 0, (column < groups + seen) & (at >= 0)) & (
        workspace_row < params.workspace_rows
    )
    row = request[:, None] * params.workspace_rows + workspace_row
    rows.copy_(row.where(valid & (row <= torch.iinfo(rows.dtype).max), -1))
    params.counts.copy_((groups + seen)[:, 0])
