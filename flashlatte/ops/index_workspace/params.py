"""The arguments of an implementation."""

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
