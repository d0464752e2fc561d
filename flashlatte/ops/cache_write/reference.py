"""``cache_write``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.codec import split_rows
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format
from flashlatte.kv_cache.slots import stored_tokens, write_slots


class CacheWriteParams(NamedTuple):
    """The checked arguments of ``api.cache_write``; the scale is ``scale_value`` if ``scale_tensor`` is None."""

    cache: torch.Tensor
    slot_mapping: torch.Tensor
    x: torch.Tensor
    rope: torch.Tensor | None
    cache_format: str
    head_dim: int
    scale_tensor: torch.Tensor | None
    scale_value: float
    scale_rounding: str
    request_ids: torch.Tensor | None = None
    page_indices: torch.Tensor | None = None
    page_indptr: torch.Tensor | None = None

    @property
    def layout(self) -> CacheFormat:
        return as_format(self.cache_format, self.head_dim)


def cache_write(params: CacheWriteParams) -> None:
    layout, rope = params.layout, params.rope
    tokens, slots = stored_tokens(_slots(params), params.cache)
    latent, rope = split_rows(layout, params.x[tokens], None if rope is None else rope[tokens])
    scale = params.scale_value if params.scale_tensor is None else params.scale_tensor
    write_slots(params.cache, slots, layout.encode(latent, rope, scale, params.scale_rounding), layout)


def _slots(params: CacheWriteParams) -> torch.Tensor:
    """The slot of each token; -1 for a token that is skipped."""
    positions, indices, indptr = params.slot_mapping, params.page_indices, params.page_indptr
    if params.request_ids is None or indices is None or indptr is None:
        return positions
    pages, page_size = params.cache.shape[:2]
    positions, request = positions.long(), params.request_ids.long()
    valid = (positions >= 0) & (request >= 0) & (request < indptr.shape[0] - 1)
    if indices.shape[0] == 0 or indptr.shape[0] < 2:
        return torch.full_like(positions, -1)
    request = request.where(valid, 0)
    entry = indptr[request].long() + positions // page_size
    valid &= (entry >= 0) & (entry < indptr[request + 1]) & (entry < indices.shape[0])
    page = indices[entry.where(valid, 0)].long()
    valid &= (page >= 0) & (page < pages)
    return (page.where(valid, 0) * page_size + positions % page_size).where(valid, -1)
