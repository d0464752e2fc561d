"""The arguments of an implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class MergeStatesParams(NamedTuple):
    """The checked arguments of ``api.merge_states``.

    Attributes:
        context_tensor, context_tokens: a one-element tensor, or a number; both None if all entries are merged.
        scale_tensor, scale_value: scale of an e4m3 output; the value is used if the tensor is None.
    """

    outs: Sequence[torch.Tensor]
    lses: Sequence[torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor
    context_tensor: torch.Tensor | None
    context_tokens: int | None
    scale_tensor: torch.Tensor | None
    scale_value: float
