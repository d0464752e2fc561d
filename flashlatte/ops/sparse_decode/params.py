"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format


class SparseDecodeParams(NamedTuple):
    """The checked arguments of ``api.sparse_decode``. ``cache_format``: the name of k_cache's format."""

    q: torch.Tensor
    k_cache: torch.Tensor
    indices: torch.Tensor
    cache_format: str
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    extra_k_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    softmax_scale: float
    empty_lse: float
    batch_invariant: bool
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def layout(self) -> CacheFormat:
        """The format of k_cache."""
        return as_format(self.cache_format, self.q.shape[-1])

    @property
    def extra_layout(self) -> CacheFormat:
        """The format of extra_k_cache, or that of k_cache without one."""
        cache = self.extra_k_cache
        return self.layout if cache is None else self.layout.second_format(cache.shape[-1])

    @property
    def is_uniform(self) -> bool:
        """Whether all query tokens have the same number of keys."""
        return self.topk_length is None and self.extra_topk_length is None
