"""Reading and writing of tokens by slot, in plain PyTorch."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.codec import as_cache, check_float_dtype, one_scale
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.runtime import checks, value_checks


def read(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cache_format: str | CacheFormat | None = None,
    scale: float | torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The dequantized rows at ``slots``, to inspect a cache.

    Args:
        cache: [pages, page_size, 1, width] (or without the 1).
        slots: int32 or int64, any shape: page · page_size + offset. A slot outside the cache reads as zeros.
        cache_format: inferred from the cache if None.
        scale: the per-tensor scale of format ``fp8`` (default 1); an error for other formats.
        dtype: dtype of the result: bf16, fp16 or float32.

    Returns:
        [*slots.shape, head_dim] in ``dtype``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    cache, layout = as_cache(cache, cache_format)
    slots = checks.given("slots", slots)
    check_float_dtype(dtype)
    checks.indices("slots", slots, slots.shape, cache.device)
    return read_slots(cache, slots, layout, one_scale(layout, scale)).to(dtype)


def read_slots(
    cache: torch.Tensor, slots: torch.Tensor, layout: CacheFormat, scale: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """float32 rows [*slots.shape, head_dim] of a checked cache; slots outside it read as zeros."""
    page_size, valid = cache.shape[1], in_cache(slots, cache)
    safe = torch.where(valid, slots.long(), 0)
    page, offset = safe // page_size, safe % page_size
    rows = layout.decode(tuple(view[page, offset] for view in layout.page_views(cache)), scale)
    return torch.where(valid.unsqueeze(-1), rows, 0.0)


def check_slots(slot_mapping: torch.Tensor, cache: torch.Tensor, name: str, tokens: int) -> None:
    """Check slot_mapping [n] of a cache [pages, page_size, …], with n at most the ``tokens`` of the argument ``name``.

    n may be 0.
    """
    accepted, device = checks.INDEX_DTYPES, cache.device
    checks.tensor("slot_mapping", slot_mapping, ("n",), accepted, device, unit_last_stride=False, may_be_empty=1)
    if slot_mapping.shape[0] > tokens:
        raise ValueError(f"slot_mapping must not be longer than {name} ({tokens} tokens), got {slot_mapping.shape[0]}")
    value_checks.entries("slot_mapping", slot_mapping, cache.shape[0] * cache.shape[1])


def in_cache(slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Whether each of int32 or int64 ``slots``, of any shape, is in a cache [pages, page_size, …]."""
    # When PyTorch compares int32 values with a larger number, that number wraps.
    slots = slots.long()
    return (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])


def stored_tokens(slot_mapping: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of tokens whose slots are in a cache, and those slots: int64 [n] each."""
    (tokens,) = torch.where(in_cache(slot_mapping, cache))
    return tokens, slot_mapping[tokens].long()


def write_slots(
    cache: torch.Tensor, slots: torch.Tensor, planes: tuple[torch.Tensor, ...], layout: CacheFormat
) -> None:
    """Write n tokens, encoded by ``CacheFormat.encode``, to ``slots`` [n], which must be in the cache."""
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    for view, plane in zip(layout.page_views(cache), planes, strict=True):
        view[page, offset] = plane


def slots_in_table(
    positions: torch.Tensor, block_table: torch.Tensor, page_size: int, requests: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of positions within the requests of their rows, and whether those are in the table.

    Args:
        positions: int64 [rows, n], below 0 for none.
        block_table: int32 or int64 [b, max_pages].
        requests: int64 [rows], the request of each row.
        dtype: dtype that the caller stores slots in; a page beyond its largest slot is not valid.

    Returns:
        int64 and bool [rows, n].
    """
    count, max_pages = block_table.shape
    request, entry = requests.unsqueeze(1), positions // page_size
    valid = (positions >= 0) & (entry < max_pages) & (request >= 0) & (request < count)
    page = block_table[request.clamp(0, count - 1), entry.clamp(0, max_pages - 1)].long()
    # An invalid page in the table must not overflow to a valid slot.
    valid = valid & (page >= 0) & (page <= torch.iinfo(dtype).max // page_size)
    return page * page_size + positions % page_size, valid
