"""Arguments of gather operations, and the request and slot of each gathered row."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks, value_checks


def check(
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, seq_starts: torch.Tensor | None, device: torch.device
) -> None:
    """Check block_table [b, max_pages], cu_seqlens [b + 1] or [b], seq_starts [b]; if b is 0, max_pages may be 0."""
    may_be_empty = 2 if checks.is_strided(block_table) and block_table.shape[:1] == (0,) else 0
    checks.tensor(
        "block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES, device, may_be_empty=may_be_empty
    )
    requests = block_table.shape[0]
    open_end = requests > 0 and checks.is_strided(cu_seqlens) and cu_seqlens.shape == (requests,)
    boundaries = requests if open_end else requests + 1
    checks.indices("cu_seqlens", cu_seqlens, (boundaries,), device)
    if seq_starts is not None:
        checks.indices("seq_starts", seq_starts, (requests,), device)


def check_values(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    rows: int,
    seq_ends: torch.Tensor | None = None,
) -> None:
    """With FLASHLATTE_CHECK=1, check that the pages of all gathered tokens exist."""
    if not value_checks.ENABLED or block_table.shape[0] == 0:
        return
    if cu_seqlens.shape[0] == block_table.shape[0]:
        cu_seqlens = torch.nn.functional.pad(cu_seqlens.long(), (0, 1), value=rows)
    value_checks.lengths("cu_seqlens", cu_seqlens, rows)
    ends = cu_seqlens.diff().long()
    if seq_starts is not None:
        ends = ends + seq_starts.long()
    if seq_ends is not None:
        ends = torch.minimum(ends, seq_ends.long())
    value_checks.pages(block_table, ends, *cache.shape[:2], name="cu_seqlens", starts=seq_starts)


def slots_of_rows(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    num_rows: int,
    seq_ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row, whether it belongs to a request, and the slot of its token (-1 if that is not in the cache).

    With ``seq_ends``, only rows of tokens before that position belong to a request.
    """
    num_pages, page_size = cache.shape[:2]
    rows = torch.arange(num_rows, device=cache.device)
    cu_seqlens = cu_seqlens.long()
    requests = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    inside = (requests >= 0) & (requests < block_table.shape[0])
    requests = requests.clamp(0, block_table.shape[0] - 1)

    positions = rows - cu_seqlens[requests]
    if seq_starts is not None:
        positions = positions + seq_starts[requests]
    if seq_ends is not None:
        inside = inside & (positions < seq_ends[requests])
    table_column = positions // page_size
    in_table = (positions >= 0) & (table_column < block_table.shape[1])
    page = block_table[requests, table_column.clamp(0, block_table.shape[1] - 1)].long()
    found = in_table & (page >= 0) & (page < num_pages)
    return inside, torch.where(found, page * page_size + positions % page_size, -1)
