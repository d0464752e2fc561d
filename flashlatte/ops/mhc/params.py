"""The arguments of an implementation of ``mhc_pre``."""

from __future__ import annotations

from typing import NamedTuple

import torch


class MhcPreParams(NamedTuple):
    """The checked arguments of ``api.mhc_pre``, and its results."""

    streams: torch.Tensor
    projected: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    rms_eps: float
    eps: float
    iterations: int
    shares: torch.Tensor
    mixture: torch.Tensor
    seen: torch.Tensor
