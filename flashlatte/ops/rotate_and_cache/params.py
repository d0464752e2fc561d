"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format


class RotateAndCacheParams(NamedTuple):
    """The checked arguments of ``api.rotate_and_cache``.

    ``q`` is None if the queries are in ``out``, because a registered operation must not read and write one tensor.
    """

    q: torch.Tensor | None
    kv: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    q_eps: float | None
    cache_format: str
    scale_rounding: str
    out: torch.Tensor
    cache: torch.Tensor

    @property
    def queries(self) -> torch.Tensor:
        return self.out if self.q is None else self.q

    @property
    def layout(self) -> CacheFormat:
        return as_format(self.cache_format, self.kv.shape[-1])
