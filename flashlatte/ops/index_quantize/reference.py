"""``index_quantize`` and ``index_gather``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.fp8 import as_bytes
from flashlatte.kv_cache.index_formats import as_index_cache
from flashlatte.kv_cache.slots import stored_tokens, write_slots


class IndexQuantizeParams(NamedTuple):
    """The checked arguments of ``api.index_quantize``; ``k`` has as many tokens as ``slot_mapping``."""

    cache: torch.Tensor
    slot_mapping: torch.Tensor
    k: torch.Tensor
    scale_rounding: str


class IndexGatherParams(NamedTuple):
    """The checked arguments of ``api.index_gather``; one-byte ``stored`` keys are uint8."""

    cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_starts: torch.Tensor | None
    stored: torch.Tensor
    scales: torch.Tensor | None
    head_dim: int


def index_quantize(params: IndexQuantizeParams) -> None:
    k = params.k
    cache, layout = as_index_cache(params.cache, k.shape[-1])
    tokens, slots = stored_tokens(params.slot_mapping, cache)
    planes = layout.encode(k[tokens], k[tokens, :0], 1.0, params.scale_rounding)
    write_slots(cache, slots, planes, layout)


def index_gather(params: IndexGatherParams) -> None:
    cache, layout = as_index_cache(params.cache, params.head_dim)
    page_size = cache.shape[1]
    inside, slots = gather_slots.slots_of_rows(
        cache, params.block_table, params.cu_seqlens, params.seq_starts, params.stored.shape[0]
    )
    slot = slots.clamp_min(0)
    for view, out in zip(layout.page_views(cache), (params.stored, params.scales), strict=False):
        if out is not None:
            target = out.view(out.shape[0], -1)
            stored = torch.where((slots >= 0).unsqueeze(1), view[slot // page_size, slot % page_size], 0)
            typed = stored if stored.dtype == target.dtype else as_bytes(stored).view(target.dtype)
            target[inside] = typed[inside]
