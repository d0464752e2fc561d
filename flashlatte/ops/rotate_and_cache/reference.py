"""``rotate_and_cache`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kernels.rope import rotate_tail
from flashlatte.kv_cache.row_caches import encode_rows
from flashlatte.kv_cache.slots import stored_tokens, write_slots
from flashlatte.ops.rotate_and_cache.params import RotateAndCacheParams


def rotate_and_cache(params: RotateAndCacheParams) -> None:
    layout, cos_sin, positions = params.layout, params.cos_sin, params.positions
    tokens, slots = stored_tokens(params.slot_mapping, params.cache)
    keys = rotate_tail(params.kv[tokens].float(), cos_sin, positions[tokens])
    write_slots(params.cache, slots, encode_rows(layout, keys, params.scale_rounding), layout)
    x = params.queries.float()
    if params.q_eps is not None:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + params.q_eps)
    params.out.copy_(rotate_tail(x, cos_sin, positions))
