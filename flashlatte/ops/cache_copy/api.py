"""Whole pages: copied within a cache, and moved between caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashlatte.kv_cache.fp8 import raw_view
from flashlatte.runtime import checks

Pages = Sequence[int] | torch.Tensor


def copy_blocks(caches: torch.Tensor | Sequence[torch.Tensor], src_pages: Pages, dst_pages: Pages) -> None:
    """Copy pages within each cache (one a layer, say): page dst_pages[i] becomes what src_pages[i] was.

    Every source is read before any page is written, so a list may exchange pages. Page numbers are host data:
    lists, or integer tensors, which are read back if they are on a GPU.

    Raises:
        TypeError, ValueError: page numbers that are no integers, not in the cache, unequal in number, or a page
            written twice.
    """
    all_caches = [caches] if isinstance(caches, torch.Tensor) else list(caches)
    for cache in all_caches:
        _check_paged("caches", cache)
        source, target = _page_pairs(src_pages, dst_pages, cache.shape[0], cache.shape[0])
        if target:
            raw_view(cache)[target] = raw_view(cache)[source]


def swap_blocks(src_cache: torch.Tensor, dst_cache: torch.Tensor, src_pages: Pages, dst_pages: Pages) -> None:
    """Copy page src_pages[i] of one cache to page dst_pages[i] of another, on the same device or another.

    Arguments and errors as ``copy_blocks``; the caches must have the same dtype and page shape.
    """
    _check_paged("src_cache", src_cache)
    _check_paged("dst_cache", dst_cache)
    if src_cache.dtype != dst_cache.dtype:
        raise TypeError(
            f"dst_cache must have src_cache's dtype {checks.dtype_names([src_cache.dtype])}, "
            f"got {checks.dtype_names([dst_cache.dtype])}"
        )
    if src_cache.shape[1:] != dst_cache.shape[1:]:
        raise ValueError(
            f"dst_cache must have src_cache's page shape {list(src_cache.shape[1:])}, got {list(dst_cache.shape[1:])}"
        )
    source, target = _page_pairs(src_pages, dst_pages, src_cache.shape[0], dst_cache.shape[0])
    if target:
        raw_view(dst_cache)[target] = raw_view(src_cache)[source].to(dst_cache.device)


def _check_paged(name: str, cache: object) -> None:
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(cache).__name__}")
    if cache.dim() < 2:
        raise ValueError(f"{name} must have shape [pages, page_size, …], got {list(cache.shape)}")


def _page_pairs(src_pages: Pages, dst_pages: Pages, src_count: int, dst_count: int) -> tuple[list[int], list[int]]:
    source = _page_list("src_pages", src_pages, src_count)
    target = _page_list("dst_pages", dst_pages, dst_count)
    if len(source) != len(target):
        raise ValueError(f"dst_pages must be as many as src_pages ({len(source)}), got {len(target)}")
    if len(set(target)) != len(target):
        raise ValueError(f"dst_pages must differ from each other, got {target}")
    return source, target


def _page_list(name: str, pages: Pages, count: int) -> list[int]:
    if isinstance(pages, torch.Tensor):
        if pages.dtype not in checks.INDEX_DTYPES or pages.dim() != 1:
            raise TypeError(
                f"{name} must be a list of ints or a 1-D int32 or int64 tensor, "
                f"got {checks.dtype_names([pages.dtype])} {list(pages.shape)}"
            )
        pages = pages.tolist()
    result = list(pages)
    for page in result:
        if isinstance(page, bool) or not isinstance(page, int):
            raise TypeError(f"{name} must hold ints, got {page!r}")
        if not 0 <= page < count:
            raise ValueError(f"{name} must be pages from 0 to {count - 1}, got {page}")
    return result
