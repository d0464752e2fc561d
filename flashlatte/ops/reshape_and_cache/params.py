"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ReshapeAndCacheParams(NamedTuple):
    """The checked arguments of ``api.reshape_and_cache``.

    Caches are [pages, page_size, h_kv, d / x, x]. A scale is ``…_scale_value`` if the tensor is None; it is written to
    if the tensor has three axes.
    """

    key: torch.Tensor
    value: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor | None
    k_scale_value: float
    v_scale: torch.Tensor | None
    v_scale_value: float
