"""The arguments of an implementation of ``latent_rows``."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LatentRowsParams(NamedTuple):
    """The checked arguments of ``api.latent_rows``, and its results."""

    kv_a: torch.Tensor
    weight: torch.Tensor
    eps: float
    table: torch.Tensor
    positions: torch.Tensor
    interleaved: bool
    q_a: torch.Tensor | None
    q_weight: torch.Tensor | None
    q_eps: float
    slot_mapping: torch.Tensor | None
    rows: torch.Tensor
    q_out: torch.Tensor | None
    cache: torch.Tensor | None
