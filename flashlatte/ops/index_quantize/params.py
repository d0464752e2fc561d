"""The arguments of implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch


class IndexQuantizeParams(NamedTuple):
    """The checked arguments of ``api.index_quantize``; ``k`` has as many tokens as ``slot_mapping``."""

    cache: torch.Tensor
    slot_mapping: torch.Tensor
    k: torch.Tensor
    scale_rounding: str


class IndexGatherParams(NamedTuple):
    """The checked arguments of ``api.index_gather``; one-byte ``stored`` keys are uint8."""

    cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_starts: torch.Tensor | None
    stored: torch.Tensor
    scales: torch.Tensor | None
    head_dim: int
