"""Page copies in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.fp8 import raw_view


def copy_pages(
    src_cache: torch.Tensor | None,
    dst_cache: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    disjoint: bool,
) -> None:
    """All sources are read before any page is written, whether ``disjoint`` or not."""
    source = dst_cache if src_cache is None else src_cache
    exists = (src_pages >= 0) & (src_pages < source.shape[0]) & (dst_pages >= 0) & (dst_pages < dst_cache.shape[0])
    pages = raw_view(source)[src_pages[exists].to(source.device, torch.int64)]
    raw_view(dst_cache)[dst_pages[exists].to(dst_cache.device, torch.int64)] = pages.to(dst_cache.device)
