"""``rotate_and_cache``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels.rope import rotate_tail
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format
from flashlatte.kv_cache.row_caches import encode_rows
from flashlatte.kv_cache.slots import stored_tokens, write_slots


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


def rotate_and_cache(params: RotateAndCacheParams) -> None:
    layout, cos_sin, positions = params.layout, params.cos_sin, params.positions
    tokens, slots = stored_tokens(params.slot_mapping, params.cache)
    keys = rotate_tail(params.kv[tokens].float(), cos_sin, positions[tokens])
    write_slots(params.cache, slots, encode_rows(layout, keys, params.scale_rounding), layout)
    x = params.queries.float()
    if params.q_eps is not None:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + params.q_eps)
    params.out.copy_(rotate_tail(x, cos_sin, positions))
