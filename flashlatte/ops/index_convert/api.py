"""Token positions of requests as slots of a paged cache."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks


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
        block_table: int32 or int64 [b, max_pages]; both may be 0.
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
    checks.tensor("block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES, may_be_empty=2)
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
    if requests == 0 or max_pages == 0 or positions.numel() == 0:
        return torch.full_like(positions, -1, dtype=dtype)
    request = request.view(-1, *[1] * (positions.dim() - 1))
    positions = positions.long()
    column = positions // page_size
    valid = (positions >= 0) & (column < max_pages) & (request >= 0) & (request < requests)
    page = block_table[request.clamp(0, requests - 1), column.clamp(0, max_pages - 1)].long()
    slot = page * page_size + positions % page_size
    # A garbage page in the table must not wrap into a slot that exists.
    fits = slot <= torch.iinfo(dtype).max
    return torch.where(valid & (page >= 0) & fits, slot, -1).to(dtype)
