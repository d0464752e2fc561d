"""``reshape_and_cache`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.fp8 import raw_view
from flashlatte.kv_cache.one_byte import LARGEST, quantize, row_scales
from flashlatte.kv_cache.slots import stored_tokens


@torch.no_grad()
def reshape_and_cache(
    key: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    k_scale_value: float,
    value: torch.Tensor,
    v_cache: torch.Tensor,
    v_scale: torch.Tensor | None,
    v_scale_value: float,
) -> None:
    """Caches [pages, page_size, h_kv, pieces, x]. Scales [pages, page_size, h_kv] are written to."""
    page_size = k_cache.shape[1]
    tokens, slots = stored_tokens(slot_mapping, k_cache)
    where = (slots // page_size, slots % page_size)
    _write(key[tokens], k_cache, where, k_scale, k_scale_value)
    _write(value[tokens], v_cache, where, v_scale, v_scale_value)


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
