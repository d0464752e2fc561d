"""``rotate_and_cache`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kernels.rope import rotate_tail
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.row_caches import encode_rows
from flashlatte.kv_cache.slots import stored_tokens, write_slots


def rotate_and_cache(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_eps: float | None,
    layout: CacheFormat,
    scale_rounding: str,
    out: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    tokens, slots = stored_tokens(slot_mapping, cache)
    keys = rotate_tail(kv[tokens].float(), cos_sin, positions[tokens])
    write_slots(cache, slots, encode_rows(layout, keys, scale_rounding), layout)
    x = q.float()
    if q_eps is not None:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + q_eps)
    out.copy_(rotate_tail(x, cos_sin, positions))
