"""``topk`` in plain PyTorch: the specification.

Entries are ordered by value, with NaN below all others and -0 equal to 0; ties are resolved in favor of the lower
index. With a block table, the selected columns are converted to slots as by ``index_convert``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache.slots import slots_in_table

# Entries that are sorted together.
ENTRIES = 2**25
# Below every ordered value: no entry of the row.
OUTSIDE = torch.iinfo(torch.int32).min


class TopkParams(NamedTuple):
    """The checked arguments of ``api.topk``; k is the width of ``indices``. ``page_size`` is 1 without a table."""

    logits: torch.Tensor
    start: torch.Tensor | None
    end: torch.Tensor | None
    next_n: int
    indices: torch.Tensor
    values: torch.Tensor | None
    block_table: torch.Tensor | None = None
    page_size: int = 1
    request_ids: torch.Tensor | None = None

    @property
    def per_request(self) -> bool:
        """Whether ``end`` has an entry for each request, rather than for each row."""
        return self.end is not None and self.end.shape[0] != self.logits.shape[0]


def topk(params: TopkParams) -> None:
    logits, indices, values = params.logits, params.indices, params.values
    rows, width = logits.shape
    k = indices.shape[1]
    first, last = row_ranges(params)
    column = torch.arange(width, device=logits.device)
    rows_at_a_time = max(1, ENTRIES // max(width, 1))
    for begin in range(0, rows, rows_at_a_time):
        part = slice(begin, begin + rows_at_a_time)
        inside = (column >= first[part].unsqueeze(1)) & (column < last[part].unsqueeze(1))
        order = ordered(logits[part]).where(inside, OUTSIDE).sort(dim=1, descending=True, stable=True).indices[:, :k]
        order = torch.nn.functional.pad(order, (0, k - order.shape[1]))
        count = (last - first)[part].clamp(0, k).unsqueeze(1)
        chosen = torch.arange(k, device=logits.device) < count
        # In ascending order of index, as every implementation returns them.
        position = order.where(chosen, width).sort(dim=1).values
        position = position.where(chosen, -1)
        columns = torch.where(chosen, position - first[part].unsqueeze(1), -1)
        indices[part] = slots_of(params, part, columns).to(indices.dtype)
        if values is not None:
            taken = logits[part].float().gather(1, position.clamp(min=0)) if width else values[part]
            values[part] = taken.where(chosen, -torch.inf)


def slots_of(params: TopkParams, part: slice, columns: torch.Tensor) -> torch.Tensor:
    """The slots of selected ``columns`` [n, k] of some rows if there is a block table, else the columns."""
    block_table, request_ids = params.block_table, params.request_ids
    if block_table is None:
        return columns
    if request_ids is None:
        requests = torch.arange(params.logits.shape[0], device=columns.device)[part] // params.next_n
    else:
        requests = request_ids[part].long()
    slots, valid = slots_in_table(columns, block_table, params.page_size, requests, params.indices.dtype)
    return slots.where(valid & (slots <= torch.iinfo(params.indices.dtype).max), -1)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """int32 keys in the order of the values; NaN becomes the lowest key above ``OUTSIDE``."""
    bits = (x.float() + 0.0).view(torch.int32)  # -0 + 0 is 0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(x.isnan(), OUTSIDE + 1, keys)


def row_ranges(params: TopkParams) -> tuple[torch.Tensor, torch.Tensor]:
    """First column and end (exclusive) of each row, int64."""
    logits, start, end, next_n = params.logits, params.start, params.end, params.next_n
    rows, width = logits.shape
    first = (
        torch.zeros(rows, dtype=torch.int64, device=logits.device) if start is None else start.long().clamp(0, width)
    )
    if end is None:
        return first, torch.full_like(first, width)
    last = end.long().clamp_min(0)  # no difference wraps round
    if params.per_request:
        last = last.repeat_interleave(next_n) + torch.arange(1 - next_n, 1, device=end.device).repeat(last.shape[0])
    return first, last.clamp(max=width).maximum(first)
