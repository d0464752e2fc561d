"""``copy_blocks`` and ``swap_blocks``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from flashlatte.runtime import checks, dispatch, refusals, value_checks
from flashlatte.runtime.torch_op import register_op

OPERATION = "cache_copy"
Pages = Sequence[int] | torch.Tensor


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    if reason := refusals.triton(call):
        return reason
    if call.pages_reachable:
        return None
    return "takes caches on one GPU or in pinned host memory, with contiguous pages"


def copy_blocks(
    caches: torch.Tensor | Sequence[torch.Tensor],
    src_pages: Pages,
    dst_pages: Pages,
    *,
    backend: str | None = None,
) -> None:
    """Copy pages within each cache (such as one per layer): page src_pages[i] to page dst_pages[i].

    All source pages are read before any page is written, so a list may exchange pages.

    Args:
        caches: [pages, page_size, …] of any format, one or several.
        src_pages, dst_pages: lists of ints, or int32 or int64 tensors [n]. Lists and tensors on the CPU are checked.
            Tensors on a GPU are not read by the host: a pair with a page outside the cache is skipped, and
            ``dst_pages`` must be distinct. Their values may change between replays of a CUDA graph.
        backend: "portable" or "reference"; None selects one.

    Raises:
        TypeError, ValueError: page numbers that are not integers or not in the cache, lists of different lengths, or a
            page written twice.
    """
    if not isinstance(caches, Iterable):
        raise TypeError(f"caches must be a tensor or several tensors, got {type(caches).__name__}")
    every = [caches] if isinstance(caches, torch.Tensor) else list(caches)
    for cache in every:
        _check_paged("caches", cache)
        checks.writable("caches", cache)
    # All pairs are checked before any page is written. Iterators are converted to lists first, because each cache reads
    # them.
    src_pages, dst_pages = _as_list(src_pages), _as_list(dst_pages)
    pairs = [_page_pairs(src_pages, dst_pages, cache.shape[0], cache.shape[0]) for cache in every]
    for cache, (source, target) in zip(every, pairs, strict=True):
        chosen = dispatch.select(_call(cache, cache), backend)
        if len(source) and cache.numel():
            on_device = _on_device(source, cache.device), _on_device(target, cache.device)
            _copy_pages(None, cache, *on_device, _are_disjoint(source, target), chosen)


def swap_blocks(
    src_cache: torch.Tensor,
    dst_cache: torch.Tensor,
    src_pages: Pages,
    dst_pages: Pages,
    *,
    backend: str | None = None,
) -> None:
    """Copy page src_pages[i] of one cache to page dst_pages[i] of another, on the same or another device.

    Between a GPU and pinned host memory this is one asynchronous launch on the current stream. Read or free the host
    memory only after synchronizing with that stream. With unpinned host memory the call synchronizes.

    Args:
        src_cache, dst_cache: [pages, page_size, …] of any format, with the same dtype and page shape; they must not
            share memory.
        src_pages, dst_pages, backend: as for ``copy_blocks``.

    Raises:
        TypeError, ValueError: as ``copy_blocks``; caches with different dtypes or page shapes, or with the same
            address.
    """
    _check_paged("src_cache", src_cache)
    _check_paged("dst_cache", dst_cache)
    checks.writable("dst_cache", dst_cache)
    if src_cache.dtype != dst_cache.dtype:
        raise TypeError(
            f"dst_cache must have src_cache's dtype {checks.dtype_names([src_cache.dtype])}, "
            f"got {checks.dtype_names([dst_cache.dtype])}"
        )
    if src_cache.shape[1:] != dst_cache.shape[1:]:
        raise ValueError(
            f"dst_cache must have src_cache's page shape {list(src_cache.shape[1:])}, got {list(dst_cache.shape[1:])}"
        )
    checks.no_overlap("dst_cache", dst_cache, src_cache=src_cache)
    if (src_cache.device.type == "meta") != (dst_cache.device.type == "meta"):
        raise ValueError(
            f"dst_cache must be a meta tensor if src_cache is, and only then, "
            f"got {dst_cache.device} and {src_cache.device}"
        )
    source, target = _page_pairs(src_pages, dst_pages, src_cache.shape[0], dst_cache.shape[0])
    call = _call(src_cache, dst_cache)
    backend = dispatch.select(call, backend)
    if len(source) and dst_cache.numel():
        on_device = _on_device(source, call.device), _on_device(target, call.device)
        _copy_pages(src_cache, dst_cache, *on_device, True, backend)


@register_op(OPERATION, mutates=("dst_cache",))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _copy_pages(
    src_cache: torch.Tensor | None,
    dst_cache: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    disjoint: bool,
    backend: str,
) -> None:
    """``src_cache``: None if it is ``dst_cache``. ``disjoint``: no page is both read and written."""
    if backend == "portable":
        from flashlatte.ops.cache_copy.portable import copy_pages
    else:
        from flashlatte.ops.cache_copy.reference import copy_pages

    copy_pages(src_cache, dst_cache, src_pages, dst_pages, disjoint)


def _call(src_cache: torch.Tensor, dst_cache: torch.Tensor) -> dispatch.CallSpec:
    device = dst_cache.device if src_cache.device.type == "cpu" else src_cache.device
    reachable = _same_dense_pages(src_cache, dst_cache) and all(
        cache.device == device or (cache.device.type == "cpu" and cache.is_pinned()) for cache in (src_cache, dst_cache)
    )
    return dispatch.CallSpec(
        OPERATION, device, dst_cache.dtype, page_size=dst_cache.shape[1], pages_reachable=reachable
    )


def _same_dense_pages(src_cache: torch.Tensor, dst_cache: torch.Tensor) -> bool:
    """Whether pages are contiguous, with the same order of elements in both caches."""
    axes = [axis for axis in range(1, dst_cache.dim()) if dst_cache.shape[axis] > 1]
    if any(src_cache.stride(axis) != dst_cache.stride(axis) for axis in axes):
        return False
    size = 1
    while axes:
        # torch.compile cannot sort symbolic strides.
        inner = next((axis for axis in axes if dst_cache.stride(axis) == size), None)
        if inner is None:
            return False
        size *= dst_cache.shape[inner]
        axes.remove(inner)
    return True


def _check_paged(name: str, cache: object) -> None:
    cache = checks.given(name, cache)
    if cache.dim() < 2:
        raise ValueError(f"{name} must have shape [pages, page_size, …], got {list(cache.shape)}")
    if cache.dtype.is_complex:
        raise TypeError(f"{name} must have a real dtype, got {checks.dtype_names([cache.dtype])}")


def _page_pairs(
    src_pages: Pages, dst_pages: Pages, src_count: int, dst_count: int
) -> tuple[torch.Tensor | list[int], torch.Tensor | list[int]]:
    source = _checked_pages("src_pages", src_pages, src_count)
    target = _checked_pages("dst_pages", dst_pages, dst_count)
    if len(source) != len(target):
        raise ValueError(f"dst_pages must have src_pages' length {len(source)}, got {len(target)}")
    if isinstance(target, list) and len(set(target)) != len(target):
        raise ValueError(f"dst_pages must differ from each other, got {target}")
    return source, target


def _as_list(pages: Pages) -> Pages:
    return pages if isinstance(pages, torch.Tensor) or not isinstance(pages, Iterable) else list(pages)


def _checked_pages(name: str, pages: Pages, count: int) -> torch.Tensor | list[int]:
    """A tensor on a GPU or in a compiled program unchanged; others as a checked list of page numbers."""
    if isinstance(pages, torch.Tensor):
        if checks.given(name, pages).dtype not in checks.INDEX_DTYPES or pages.dim() != 1:
            raise TypeError(
                f"{name} must be a list of ints or a 1-D int32 or int64 tensor, "
                f"got {checks.dtype_names([pages.dtype])} {list(pages.shape)}"
            )
        if not checks.has_values(pages):
            value_checks.entries(name, pages, count)
            return pages
        pages = pages.tolist()
    if not isinstance(pages, Iterable):
        raise TypeError(f"{name} must be a list of ints or a 1-D int32 or int64 tensor, got {type(pages).__name__}")
    result = list(pages)
    for page in result:
        if not checks.is_integer(page):
            raise TypeError(f"{name} must hold ints, got {page!r}")
        if not 0 <= page < count:
            raise ValueError(f"{name} must be pages from 0 to {count - 1}, got {page}")
    return result


def _on_device(pages: torch.Tensor | list[int], device: torch.device) -> torch.Tensor:
    if isinstance(pages, list):
        pages = torch.tensor(pages, dtype=torch.int64, device="cpu")
    return pages.to(device, non_blocking=device.type != "cpu")


def _are_disjoint(source: torch.Tensor | list[int], target: torch.Tensor | list[int]) -> bool:
    """Whether the host can tell that no page is both read and written."""
    return isinstance(source, list) and isinstance(target, list) and set(source).isdisjoint(target)
