"""``index_weights`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch


@torch.no_grad()
def index_weights(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(hidden.float(), weight.T, out=out)
