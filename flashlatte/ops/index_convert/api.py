"""Conversion of token positions to slots of a paged cache: ``to_cache_indices``, and ``index_convert`` for
selections."""

from __future__ import annotations

from typing import Literal, overload

import torch

from flashlatte.kv_cache.sharding import as_sharding
from flashlatte.ops.index_convert.reference import IndexConvertParams
from flashlatte.runtime import checks, dispatch, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "index_convert"


def to_cache_indices(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    *,
    request_ids: torch.Tensor | None = None,
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """Convert token positions within their requests to cache indices (page · page_size + offset).

    Args:
        positions: int32 or int64 [b, …], with one row per request; or [T, …] with ``request_ids``.
        block_table: int32 or int64 [b, max_pages]; both may be 0.
        page_size: tokens in a page.
        request_ids: int32 or int64 [T], the request of each row of ``positions``.
        dtype: dtype of the result. Caches of 2^31 tokens or more need int64.

    Returns:
        A tensor of the shape of ``positions``; -1 for a position outside the table, a negative page, a request id
        outside the table, and an index too large for ``dtype``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    page_size = checks.positive_int("page_size", page_size)
    checks.dtype("dtype", dtype, checks.INDEX_DTYPES)
    checks.tensor("block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES, may_be_empty=2)
    requests, max_pages = block_table.shape
    positions = checks.given("positions", positions)
    if positions.dtype not in checks.INDEX_DTYPES:
        raise TypeError(
            f"positions must be {checks.dtype_names(checks.INDEX_DTYPES)}, got {checks.dtype_names([positions.dtype])}"
        )
    if positions.device != block_table.device:
        raise ValueError(f"positions must be on {block_table.device} like block_table, got {positions.device}")
    if positions.dim() == 0 or (request_ids is None and positions.shape[0] != requests):
        raise ValueError(
            f"positions must have block_table's {requests} requests as its first axis (or request_ids must be "
            f"given), got shape {list(positions.shape)}"
        )
    rows, device = positions.shape[0], positions.device
    if request_ids is not None:
        checks.indices("request_ids", request_ids, (rows,), device)
    if requests == 0 or max_pages == 0 or positions.numel() == 0:
        return torch.full_like(positions, -1, dtype=dtype)
    indices = positions.reshape(rows, -1).contiguous()
    with checks.naming(indices="positions"):
        # A program of the portable kernel converts a whole row; here rows may be few and long.
        slots = index_convert(
            indices, block_table, page_size, request_ids=request_ids, dtype=dtype, backend="reference"
        )
    return slots.view(positions.shape)


@overload
def index_convert(
    indices: torch.Tensor | None,
    block_table: torch.Tensor,
    page_size: int,
    *,
    request_ids: torch.Tensor | None = ...,
    next_n: int = ...,
    query_positions: torch.Tensor | None = ...,
    sinks: int = ...,
    window: int = ...,
    workspace_ids: torch.Tensor | None = ...,
    workspace_starts: torch.Tensor | None = ...,
    sharding: tuple[int, int, int] = ...,
    compact: bool = ...,
    return_counts: Literal[False] = ...,
    slots: torch.Tensor | None = ...,
    dtype: torch.dtype = ...,
    backend: str | None = ...,
) -> torch.Tensor: ...


@overload
def index_convert(
    indices: torch.Tensor | None,
    block_table: torch.Tensor,
    page_size: int,
    *,
    request_ids: torch.Tensor | None = ...,
    next_n: int = ...,
    query_positions: torch.Tensor | None = ...,
    sinks: int = ...,
    window: int = ...,
    workspace_ids: torch.Tensor | None = ...,
    workspace_starts: torch.Tensor | None = ...,
    sharding: tuple[int, int, int] = ...,
    compact: bool = ...,
    return_counts: Literal[True],
    slots: torch.Tensor | None = ...,
    dtype: torch.dtype = ...,
    backend: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@repeats_launches
def index_convert(
    indices: torch.Tensor | None,
    block_table: torch.Tensor,
    page_size: int,
    *,
    request_ids: torch.Tensor | None = None,
    next_n: int = 1,
    query_positions: torch.Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    workspace_ids: torch.Tensor | None = None,
    workspace_starts: torch.Tensor | None = None,
    sharding: tuple[int, int, int] = (0, 1, 1),
    compact: bool = False,
    return_counts: bool = False,
    slots: torch.Tensor | None = None,
    dtype: torch.dtype = torch.int32,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Convert the positions that each query row selected to slots (page · page_size + offset).

    Args:
        indices: int32 or int64 [rows, n], positions within the row's request; below 0 for none. None: only the static
            pattern of ``sinks`` and ``window``.
        block_table: int32 or int64 [b, max_pages].
        page_size: tokens in a page.
        request_ids: int32 or int64 [rows], the request of each row. If None, row // next_n.
        next_n: rows per request, if ``request_ids`` is None.
        query_positions: int32 or int64 [rows], with ``sinks`` or ``window``: the position of the row's query token;
            below 0 for a row without the static pattern.
        sinks, window: each row also selects the first ``sinks`` tokens of its request and the last ``window`` tokens up
            to and including its query token. Their columns come before those of ``indices``, whose duplicates are
            dropped. A token that is both a sink and in the window is selected once, as a sink: its column in the window
            is -1.
        workspace_ids, workspace_starts: int32 or int64 [rows] and [n]: for a row with an id of at least 0, position p
            is slot workspace_starts[id] + p, instead of a slot from the table. A row whose id is n or more selects
            nothing. A row whose id is below 0 uses the table.
        sharding: (rank, size, interleave) of a context-parallel group: token t is on rank (t // interleave) % size.
            Tokens of other ranks become -1, and the table refers to this rank's tokens. It does not apply to rows with
            a workspace, which has the tokens of all ranks.
        compact: move the valid slots of each row to the front, keeping their order.
        return_counts: also return the number of valid slots.
        slots: [rows, sinks + window + n] int32 or int64 with last stride 1, to write to.
        dtype: dtype of the result, if ``slots`` is None.
        backend: "portable" or "reference"; None selects one.

    Returns:
        slots [rows, sinks + window + n]; -1 for no token, a token outside the table or on a negative page, and a slot
        too large for the dtype. With ``return_counts`` also int32 [rows].

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    page_size = checks.positive_int("page_size", page_size)
    sinks = checks.positive_int("sinks", sinks, or_zero=True)
    window = checks.positive_int("window", window, or_zero=True)
    next_n = checks.positive_int("next_n", next_n)
    # Under torch.compile, a comparison of symbolic numbers can be a condition but not an operand of another comparison.
    unmatched = sinks + window > 0 if query_positions is None else sinks + window == 0
    if unmatched:
        raise ValueError("query_positions must be given with sinks or window, and only then")
    rows, width, device = _selection(indices, query_positions)
    width += sinks + window
    if slots is None:
        checks.dtype("dtype", dtype, checks.INDEX_DTYPES)
        slots = torch.empty(rows, width, dtype=dtype, device=device)
    else:
        checks.output("slots", slots, (rows, width), checks.INDEX_DTYPES, device)
    checks.flag("return_counts", return_counts)
    params = IndexConvertParams(
        indices=indices,
        block_table=block_table,
        page_size=page_size,
        request_ids=request_ids,
        next_n=next_n,
        query_positions=query_positions,
        sinks=sinks,
        window=window,
        workspace_ids=workspace_ids,
        workspace_starts=workspace_starts,
        sharding=list(as_sharding(sharding)),
        compact=checks.flag("compact", compact),
        slots=slots,
        counts=torch.empty(rows, dtype=torch.int32, device=device) if return_counts else None,
    )
    _check(params)
    backend = dispatch.select(dispatch.CallSpec(OPERATION, device, slots.dtype), backend)
    if rows:
        _index_convert(params, backend)
    return slots if params.counts is None else (slots, params.counts)


@register_op(OPERATION, mutates=("slots", "counts"))
@dispatch.implemented(OPERATION, portable=refusals.triton)
def _index_convert(params: IndexConvertParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.index_convert.portable import index_convert
    else:
        from flashlatte.ops.index_convert.reference import index_convert

    index_convert(params)


def _selection(indices: torch.Tensor | None, query_positions: torch.Tensor | None) -> tuple[int, int, torch.device]:
    """The number of rows, the number of indices of a row, and the device."""
    known = query_positions if indices is None else indices
    if known is None:
        raise ValueError("indices must be given if sinks and window are 0, got None")
    rows = known.shape[0] if checks.is_strided(known) and known.dim() else 0
    if indices is None:
        checks.indices("query_positions", known, (rows,))
        return rows, 0, known.device
    checks.tensor("indices", indices, (rows, "n"), checks.INDEX_DTYPES)
    return rows, indices.shape[1], known.device


def _check(params: IndexConvertParams) -> None:
    """Check the table, and what refers to requests and workspaces."""
    block_table, rows, device = params.block_table, params.slots.shape[0], params.slots.device
    request_ids, workspace_starts = params.request_ids, params.workspace_starts
    may_be_empty = 0 if rows else 2
    checks.tensor(
        "block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES, device, may_be_empty=may_be_empty
    )
    requests, max_pages = block_table.shape
    if request_ids is None and rows != params.next_n * requests:
        raise ValueError(
            f"indices must have {params.next_n} rows for each of block_table's {requests} requests "
            f"(or request_ids must be given), got {rows}"
        )
    for name in ("request_ids", "query_positions", "workspace_ids"):
        value = getattr(params, name)
        if value is not None:
            checks.indices(name, value, (rows,), device)
    if (params.workspace_ids is None) != (workspace_starts is None):
        raise ValueError("workspace_ids and workspace_starts must be given together, got only one")
    if workspace_starts is not None:
        checks.indices("workspace_starts", workspace_starts, ("n",), device)
    if request_ids is not None:
        value_checks.entries("request_ids", request_ids, requests)
    if params.workspace_ids is not None and workspace_starts is not None:
        value_checks.entries("workspace_ids", params.workspace_ids, workspace_starts.shape[0])
    elif params.indices is not None:
        _, ranks, _ = params.sharding
        value_checks.entries("indices", params.indices, max_pages * params.page_size * ranks)
