"""``reshape_and_cache`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.fp8 import raw_view
from flashlatte.kv_cache.one_byte import LARGEST, quantize, row_scales
from flashlatte.kv_cache.slots import stored_tokens
from flashlatte.ops.reshape_and_cache.params import ReshapeAndCacheParams


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
