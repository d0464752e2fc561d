"""The plan of ``BatchMLAPagedAttentionWrapper``: tables of pages and lengths on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from flashlatte.flashinfer.conventions import rows_of
from flashlatte.flashinfer.page_tables import DecodeRows, page_table, rounded

LISTS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
# Entries of a table that is built at once: 64 MiB. With more rows, ``run`` builds it in parts.
MAX_ENTRIES = 2**24
# Entries of a table in CUDA-graph mode, if kv_indices is not longer: 16 MiB.
GRAPH_ENTRIES = 2**22


class MLAShape(NamedTuple):
    """Shapes and dtypes of queries and caches."""

    heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


class MLAPlan(NamedTuple):
    """What ``run`` computes. A row is a request with ``queries`` query tokens, or a query token.

    Attributes:
        tokens: query tokens of all requests.
        lengths: [rows], keys of each row.
        table: int32 [rows, max_pages].
        pages: kv_indices, the first entry of each row in it, and the number of columns, if the table would be too
            large: its parts are built when they are needed.
    """

    shape: MLAShape
    causal: bool
    softmax_scale: float
    queries: int
    tokens: int
    lengths: torch.Tensor
    table: torch.Tensor | None
    pages: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def tables(self, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """The first ``rows`` rows in parts: their range, and their table."""
        if self.pages is None:
            assert self.table is not None
            # Empty caches are allowed here, but not by the operations.
            if rows:
                yield slice(0, rows), rows_of(self.table, slice(0, rows))
            return
        kv_indices, begins, columns = self.pages
        step = max(MAX_ENTRIES // columns, 1)
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            yield part, page_table(kv_indices, begins[part], columns)


def eager_plan(
    shape: MLAShape, causal: bool, softmax_scale: float, rows: DecodeRows, kv_indices: torch.Tensor
) -> MLAPlan:
    begins, lengths = torch.stack((rows.begins, rows.lengths)).int().to(kv_indices.device, non_blocking=True)
    columns = rounded(rows.max_pages)
    fixed = (shape, causal, softmax_scale, rows.queries, rows.tokens, lengths)
    if begins.shape[0] * columns > MAX_ENTRIES:
        return MLAPlan(*fixed, None, (kv_indices, begins, columns))
    return MLAPlan(*fixed, page_table(kv_indices, begins, columns))


def graph_plan(
    shape: MLAShape,
    causal: bool,
    softmax_scale: float,
    rows: DecodeRows,
    lists: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    earlier: MLAPlan | None,
) -> MLAPlan:
    """A plan in the memory of the earlier one, which captured calls read. Lists are copied to the buffers."""
    if earlier is not None and shape != earlier.shape:
        raise ValueError(
            "num_heads, head_dim_ckv, head_dim_kpe, page_size, q_data_type and kv_data_type must be those of the first "
            f"plan in CUDA-graph mode, {tuple(earlier.shape)}, got {tuple(shape)}"
        )
    kv_indices, used = buffers[2], rows.lengths.shape[0]
    for name, values, buffer in zip(LISTS, lists, buffers, strict=True):
        fits = values.shape[0] <= buffer.shape[0] if buffer is kv_indices else values.shape == buffer.shape
        if not fits:
            raise ValueError(f"{name} must fit the buffer of {buffer.shape[0]} entries, got {values.shape[0]}")
    if earlier is None:
        capacity, entries = max(used, 1), kv_indices.shape[0]
        columns = min(entries, max(-(-entries // capacity), GRAPH_ENTRIES // capacity))
        # Later plans may write to these outside of inference mode.
        with torch.inference_mode(False):
            lengths = torch.zeros(capacity, dtype=torch.int32, device=kv_indices.device)
            table = torch.full((capacity, max(columns, 1)), -1, dtype=torch.int32, device=kv_indices.device)
    else:
        lengths, table = earlier.lengths, earlier.table
        assert table is not None
    capacity, columns = table.shape
    if used > capacity:
        raise ValueError(
            f"qo_indptr must have at most the {capacity * rows.queries} query tokens of the first plan in CUDA-graph "
            f"mode, got {rows.tokens}"
        )
    if rows.max_pages > columns:
        raise ValueError(
            f"kv_indptr must have at most {columns} pages for a request in CUDA-graph mode, got {rows.max_pages}: give "
            "the wrapper a longer kv_indices"
        )
    for values, buffer in zip(lists, buffers, strict=True):
        buffer[: values.shape[0]].copy_(values, non_blocking=True)
    lengths.copy_(torch.nn.functional.pad(rows.lengths, (0, capacity - used)), non_blocking=True)
    if rows.max_pages:
        begins = rows.begins.int().to(kv_indices.device, non_blocking=True)
        table[:used, : rows.max_pages].copy_(page_table(kv_indices, begins, rows.max_pages))
    return MLAPlan(shape, causal, softmax_scale, rows.queries, rows.tokens, lengths, table)
