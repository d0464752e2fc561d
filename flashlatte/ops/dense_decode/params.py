"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DenseDecodeParams(NamedTuple):
    """The checked arguments of ``api.dense_decode``.

    k_scale is ``k_scale_value`` if ``k_scale_tensor`` is None. ``precision`` is None or "fp8".
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    k_scale_tensor: torch.Tensor | None
    k_scale_value: float
    softmax_scale: float
    causal: bool
    empty_lse: float
    batch_invariant: bool
    precision: str | None
    out: torch.Tensor
    lse: torch.Tensor
