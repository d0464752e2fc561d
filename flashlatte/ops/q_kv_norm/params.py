"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class QKvNormParams(NamedTuple):
    """The checked arguments of ``api.q_kv_norm``, and its results."""

    q: torch.Tensor
    kv: torch.Tensor
    q_weight: torch.Tensor
    kv_weight: torch.Tensor
    eps: float
    q_out: torch.Tensor
    kv_out: torch.Tensor
