"""``cache_gather`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.slots import read_slots


def cache_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    layout: CacheFormat,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
    out: torch.Tensor,
) -> None:
    num_pages, page_size = cache.shape[:2]
    rows = torch.arange(out.shape[0], device=out.device)
    cu_seqlens = cu_seqlens.long()
    requests = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    inside = (requests >= 0) & (requests < block_table.shape[0])
    requests = requests.clamp(0, block_table.shape[0] - 1)

    positions = rows - cu_seqlens[requests]
    if seq_starts is not None:
        positions = positions + seq_starts[requests]
    table_column = positions // page_size
    in_table = (positions >= 0) & (table_column < block_table.shape[1])
    page = block_table[requests, table_column.clamp(0, block_table.shape[1] - 1)].long()
    found = in_table & (page >= 0) & (page < num_pages)
    slots = torch.where(found, page * page_size + positions % page_size, -1)

    scale = scale_value if scale_tensor is None else scale_tensor
    tokens = read_slots(cache, slots, layout, scale).to(out.dtype)
    out.copy_(torch.where(inside.unsqueeze(-1), tokens, out))
