"""Whole pages: copied within a cache, moved between caches, and addressed by token position."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashlatte import checks
from flashlatte.kv_cache.fp8 import raw_view

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


def to_cache_indices(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    *,
    request_ids: torch.Tensor | None = None,
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """Cache indices (page · page_size + offset) of token positions within their requests.

    Args:
        positions: int32 or int64 [b, …], the first axis being the request; or [T, …] with ``request_ids``.
        block_table: int32 or int64 [b, max_pages].
        page_size: tokens in a page.
        request_ids: int32 or int64 [T], the request of each row of ``positions``.
        dtype: of the result. Caches of 2^31 tokens and more need int64.

    Returns:
        The shape of ``positions``. A position below 0 or beyond the table, a negative page, a request id that is
        not in the table, and an index too large for ``dtype`` give −1.
    """
    page_size = checks.positive_int("page_size", page_size)
    if dtype not in checks.INDEX_DTYPES:
        raise TypeError(f"dtype must be {checks.dtype_names(checks.INDEX_DTYPES)}, got {dtype}")
    checks.tensor("block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES)
    requests, max_pages = block_table.shape
    if not isinstance(positions, torch.Tensor):
        raise TypeError(f"positions must be a tensor, got {type(positions).__name__}")
    if positions.dtype not in checks.INDEX_DTYPES:
        raise TypeError(
            f"positions must be {checks.dtype_names(checks.INDEX_DTYPES)}, got {checks.dtype_names([positions.dtype])}"
        )
    if positions.device != block_table.device:
        raise ValueError(f"positions must be on {block_table.device} like block_table, got {positions.device}")
    if request_ids is None:
        if positions.dim() == 0 or positions.shape[0] != requests:
            raise ValueError(
                f"positions must have block_table's {requests} requests as its first axis (or request_ids beside "
                f"it), got shape {list(positions.shape)}"
            )
        request = torch.arange(requests, device=positions.device)
    else:
        rows = positions.shape[0] if positions.dim() else 0
        checks.tensor(
            "request_ids", request_ids, (rows,), checks.INDEX_DTYPES, positions.device, unit_last_stride=False
        )
        request = request_ids.long()
    request = request.view(-1, *[1] * (positions.dim() - 1))
    positions = positions.long()
    column = positions // page_size
    valid = (positions >= 0) & (column < max_pages) & (request >= 0) & (request < requests)
    page = block_table[request.clamp(0, requests - 1), column.clamp(0, max_pages - 1)].long()
    slot = page * page_size + positions % page_size
    # A garbage page in the table must not wrap into a slot that exists.
    fits = slot <= torch.iinfo(dtype).max
    return torch.where(valid & (page >= 0) & fits, slot, -1).to(dtype)


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
