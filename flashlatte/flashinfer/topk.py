"""Top-k selection for sparse attention: ``top_k``, and its forms that convert positions to cache indices."""

from __future__ import annotations

from enum import IntEnum

import torch

from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.topk import topk as select
from flashlatte.runtime import checks


class TopKTieBreak(IntEnum):
    """The entry that is preferred among equal ones. FlashLatte prefers smaller indices, and refuses LARGE."""

    NONE = 0
    SMALL = 1
    LARGE = 2


def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest entries of each row: ``flashlatte.topk``.

    Args:
        input: [rows, width], float32 or bf16, or fp16, which is converted to float32.
        k: 1 to 4096, at most width.
        sorted: sort by descending value instead of by ascending index.
        deterministic, dsa_graph_safe: unused: results are deterministic, and every call may be captured.
        tie_break: ``TopKTieBreak.NONE`` or ``SMALL``: smaller indices are preferred.

    Returns:
        values [rows, k] in input's dtype and indices int64 [rows, k]. NaN is below all other values.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype or shape; ``TopKTieBreak.LARGE``.
    """
    scores = _scores(input, tie_break)
    if checks.positive_int("k", k) > input.shape[1]:
        raise ValueError(f"k must be at most input's width {input.shape[1]}, got {k}")
    with checks.naming(logits="input", sort="sorted"):
        indices, values = select(scores, k, sort=sorted, return_values=True)
    return values.to(input.dtype), indices.long()


def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slots of the k largest scores of each row: ``flashlatte.topk``.

    With starts or ``out_raw_indices``, ``flashlatte.index_convert`` converts the positions in another launch.

    A selected position p of row i, relative to ``row_starts``, becomes entry · page_size + p % page_size, where entry
    is that of the row's request at page_table_row_starts[i] + p // page_size.

    Args:
        input: [rows, width], float32 or bf16, or fp16, which is converted to float32.
        src_page_table: int32 [b, entries], an entry for each ``page_size`` positions of a request.
        lengths: int32 or int64 [rows], positions of each row.
        k: 1 to 4096.
        row_to_batch: int32 or int64 [rows], the request of each row; if None, row i is of request i.
        deterministic, tie_break, dsa_graph_safe: as in ``top_k``.
        row_starts: int32 or int64 [rows], the first column of each row; 0 if None.
        page_table_row_starts: int32 or int64 [rows], the first entry of each row; ``row_starts`` if None.
        page_size: positions of an entry. Above 1, ``row_starts`` needs ``page_table_row_starts``.
        out: int32 [rows, k] to write to.
        out_raw_indices: int32 [rows, k] to write the positions relative to ``row_starts`` to, padded with -1.

    Returns:
        ``out``, int32 [rows, k], in ascending order of position, padded with -1. A negative entry of the table, or one
        outside it, becomes -1.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; ``TopKTieBreak.LARGE``;
            ``row_starts`` alone with pages.
    """
    starts = page_table_row_starts
    scores, ends = _scores(input, tie_break), _ends(input, lengths, row_starts)
    if checks.positive_int("page_size", page_size) > 1 and row_starts is not None and starts is None:
        raise ValueError("page_table_row_starts must be given with row_starts and a page_size above 1, got None")
    if starts is None:
        starts = row_starts
    else:
        checks.indices("page_table_row_starts", starts, (input.shape[0],), input.device, may_be_empty=1)
    rows = input.shape[0]
    checks.tensor("src_page_table", src_page_table, ("b", "entries"), checks.INDEX_DTYPES, input.device, may_be_empty=2)
    if row_to_batch is None and src_page_table.shape[0] != rows:
        given = f"input's {rows} rows without row_to_batch"
        raise ValueError(f"src_page_table must have {given}, got {src_page_table.shape[0]}")
    read = {"input": input, "src_page_table": src_page_table, "lengths": lengths, "row_to_batch": row_to_batch}
    for name, buffer in (("out", out), ("out_raw_indices", out_raw_indices)):
        if buffer is not None:
            k = checks.positive_int("k", k)
            checks.output(name, buffer, (rows, k), (torch.int32,), input.device, may_be_empty=1)
            checks.no_overlap(name, buffer, **read)
    names = {"block_table": "src_page_table", "request_ids": "row_to_batch"}
    if starts is None and out_raw_indices is None:
        table = {"block_table": src_page_table, "page_size": page_size, "request_ids": row_to_batch}
        with checks.naming(logits="input", end="lengths", indices="out", **names):
            return select(scores, k, end=ends, indices=out, **table)
    positions = _selected(scores, k, row_starts, ends)
    if out_raw_indices is not None:
        out_raw_indices.copy_(positions)
    if starts is not None:
        # In 64 bits: a table may have room for more positions than a row of scores.
        entries = positions + starts.long().unsqueeze(1) * page_size
        positions = entries.masked_fill(positions < 0, -1)
    with checks.naming(indices="input", **names):
        slots = index_convert(positions, src_page_table, page_size, request_ids=row_to_batch)
    return slots if out is None else out.copy_(slots)


def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The positions of the k largest scores of each row, plus an offset: ``flashlatte.topk``.

    Args:
        input: [rows, width], float32 or bf16, or fp16, which is converted to float32.
        offsets: int32 or int64 [rows], added to the positions of a row.
        lengths: int32 or int64 [rows], positions of each row.
        k: 1 to 4096.
        deterministic, tie_break, dsa_graph_safe: as in ``top_k``.
        row_starts: int32 or int64 [rows], the first column of each row; 0 if None. Positions are relative to it.

    Returns:
        int32 [rows, k], ascending, padded with -1.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; ``TopKTieBreak.LARGE``.
    """
    indices = _selected(_scores(input, tie_break), k, row_starts, _ends(input, lengths, row_starts))
    checks.indices("offsets", offsets, (input.shape[0],), input.device, may_be_empty=1)
    return _shifted(indices, offsets)


def _ends(input: torch.Tensor, lengths: torch.Tensor, row_starts: torch.Tensor | None) -> torch.Tensor:
    """The end (exclusive) of each row of scores."""
    rows = (input.shape[0],)
    checks.indices("lengths", lengths, rows, input.device, may_be_empty=1)
    if row_starts is None:
        return lengths
    return checks.indices("row_starts", row_starts, rows, input.device, may_be_empty=1) + lengths


def _selected(scores: torch.Tensor, k: int, row_starts: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    """int32 [rows, k], relative to ``row_starts``."""
    with checks.naming(logits="input", start="row_starts", end="lengths"):
        return select(scores, k, start=row_starts, end=ends)


def _scores(input: torch.Tensor, tie_break: int) -> torch.Tensor:
    if checks.integer("tie_break", tie_break) not in (TopKTieBreak.NONE, TopKTieBreak.SMALL):
        raise ValueError(f"tie_break must be TopKTieBreak.NONE or SMALL, as smaller indices win, got {tie_break}")
    checks.tensor("input", input, ("rows", "width"), (torch.float32, torch.bfloat16, torch.float16), may_be_empty=1)
    return input.float() if input.dtype == torch.float16 else input


def _shifted(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``offsets`` [rows] added to the valid indices."""
    return torch.where(indices < 0, -1, indices + offsets.unsqueeze(1)).int()
