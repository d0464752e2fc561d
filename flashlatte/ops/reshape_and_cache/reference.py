"""``reshape_and_cache``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.fp8 import raw_view
from flashlatte.kv_cache.one_byte import LARGEST, quantize, row_scales
from flashlatte.kv_cache.slots import stored_tokens


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


@torch.no_grad()
def reshape_and_cache(params: ReshapeAndCacheParams) -> None:
    page_size = params.k_cache.shape[1]
    tokens, slots = stored_tokens(params.slot_mapping, params.k_cache)
    where = (slots // page_size, slots % page_size)
    _write(params.key[tokens], params.k_cache, where, params.k_scale, params.k_scale_value)
    _write(params.value[tokens], params.v_cache, where, params.v_scale, params.v_scale_value)


def _write(
    rows: torch.Tensor,
    cache: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor],
    scale: torch.Tensor | None,
    scale_value: float,
) -> None:
    elements = rows
    if cache.dtype in LARGEST:
        rows = rows.float()
        if scale is None:
            row_scale = torch.full_like(rows[..., :1], scale_value)
        elif scale.dim() == 3:
            row_scale = row_scales(rows, cache.dtype)
            scale[where] = row_scale.squeeze(-1)
        else:
            row_scale = scale.unsqueeze(-1)
        elements = quantize(rows, row_scale, cache.dtype)
    raw_view(cache)[where] = raw_view(elements).unflatten(-1, cache.shape[3:])
