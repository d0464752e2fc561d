"""``index_quantize`` and ``index_gather`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.fp8 import as_bytes
from flashlatte.kv_cache.index_formats import as_index_cache
from flashlatte.kv_cache.slots import stored_tokens, write_slots


def index_quantize(cache: torch.Tensor, slot_mapping: torch.Tensor, k: torch.Tensor, scale_rounding: str) -> None:
    cache, layout = as_index_cache(cache, k.shape[-1])
    tokens, slots = stored_tokens(slot_mapping, cache)
    planes = layout.encode(k[tokens], k[tokens, :0], 1.0, scale_rounding)
    write_slots(cache, slots, planes, layout)


def index_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    head_dim: int,
) -> None:
    cache, layout = as_index_cache(cache, head_dim)
    page_size = cache.shape[1]
    inside, slots = gather_slots.slots_of_rows(cache, block_table, cu_seqlens, seq_starts, values.shape[0])
    slot = slots.clamp_min(0)
    for view, out in zip(layout.page_views(cache), (values, scales), strict=False):
        if out is not None:
            target = out.view(out.shape[0], -1)
            stored = torch.where((slots >= 0).unsqueeze(1), view[slot // page_size, slot % page_size], 0)
            typed = stored if stored.dtype == target.dtype else as_bytes(stored).view(target.dtype)
            target[inside] = typed[inside]
