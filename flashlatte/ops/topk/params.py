"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TopkParams(NamedTuple):
    """The checked arguments of ``api.topk``; k is the width of ``indices``."""

    logits: torch.Tensor
    start: torch.Tensor | None
    end: torch.Tensor | None
    next_n: int
    indices: torch.Tensor
    values: torch.Tensor | None

    @property
    def per_request(self) -> bool:
        """Whether ``end`` has an entry for each request, rather than for each row."""
        return self.end is not None and self.end.shape[0] != self.logits.shape[0]
