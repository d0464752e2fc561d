"""``index_quantize`` and ``index_gather`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

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
    num_pages, page_size = cache.shape[:2]
    requests, max_pages = block_table.shape
    rows = torch.arange(values.shape[0], device=values.device)
    cu_seqlens = cu_seqlens.long()
    request = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    inside = (request >= 0) & (request < requests)
    request = request.clamp(0, requests - 1)
    position = rows - cu_seqlens[request]
    if seq_starts is not None:
        position = position + seq_starts[request].long()
    column = position // page_size
    in_table = (position >= 0) & (column < max_pages)
    page = block_table[request, column.clamp(0, max_pages - 1)].long()
    found = in_table & (page >= 0) & (page < num_pages)
    page, offset = page.where(found, 0), (position % page_size).where(found, 0)
    for view, out in zip(layout.page_views(cache), (values, scales), strict=False):
        if out is not None:
            target = out.view(out.shape[0], -1)
            stored = view[page, offset].where(found.unsqueeze(1), 0)
            typed = stored if stored.dtype == target.dtype else as_bytes(stored).view(target.dtype)
            target[inside] = typed[inside]
