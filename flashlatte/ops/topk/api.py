"""``topk``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

from typing import Literal, overload

import torch

from flashlatte.ops.topk.reference import TopkParams
from flashlatte.runtime import checks, dispatch, gradients, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "topk"
LOGIT_DTYPES = (torch.float32, torch.bfloat16)
MAX_K = 4096
_MAX_PAGE_SIZE = 2**31 - 1
# A list of selected entries must fit shared memory.
_HOPPER_MAX_K = 2048
# With this number of rows, two CTAs read each row, and beyond this number of columns the portable kernel is faster.
# With fewer rows eight CTAs read each; more rows fill the GPU.
_HOPPER_TWO_CTAS, _HOPPER_MAX_COLUMNS = range(9, 33), 262_144


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    if reason := refusals.hopper(call):
        return reason
    if call.k is not None and call.k > _HOPPER_MAX_K:
        return f"takes k up to {_HOPPER_MAX_K}, not {call.k}"
    if call.rows is None or call.columns is None or call.rows not in _HOPPER_TWO_CTAS:
        return None
    if call.columns > _HOPPER_MAX_COLUMNS:
        return (
            f"takes up to {_HOPPER_MAX_COLUMNS} columns of {_HOPPER_TWO_CTAS[0]} to {_HOPPER_TWO_CTAS[-1]} rows "
            f"(portable is faster with more), not {call.columns} of {call.rows}"
        )
    return None


@overload
def topk(
    logits: torch.Tensor,
    k: int,
    *,
    start: torch.Tensor | None = ...,
    end: torch.Tensor | None = ...,
    next_n: int = ...,
    block_table: torch.Tensor | None = ...,
    page_size: int | None = ...,
    request_ids: torch.Tensor | None = ...,
    sort: bool = ...,
    indices: torch.Tensor | None = ...,
    values: None = ...,
    return_values: Literal[False] = ...,
    backend: str | None = ...,
) -> torch.Tensor: ...


@overload
def topk(
    logits: torch.Tensor,
    k: int,
    *,
    start: torch.Tensor | None = ...,
    end: torch.Tensor | None = ...,
    next_n: int = ...,
    block_table: torch.Tensor | None = ...,
    page_size: int | None = ...,
    request_ids: torch.Tensor | None = ...,
    sort: bool = ...,
    indices: torch.Tensor | None = ...,
    values: torch.Tensor | None = ...,
    return_values: Literal[True],
    backend: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def topk(
    logits: torch.Tensor,
    k: int,
    *,
    start: torch.Tensor | None = ...,
    end: torch.Tensor | None = ...,
    next_n: int = ...,
    block_table: torch.Tensor | None = ...,
    page_size: int | None = ...,
    request_ids: torch.Tensor | None = ...,
    sort: bool = ...,
    indices: torch.Tensor | None = ...,
    values: torch.Tensor,
    return_values: bool = ...,
    backend: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def topk(
    logits: torch.Tensor,
    k: int,
    *,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    next_n: int = 1,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    request_ids: torch.Tensor | None = None,
    sort: bool = False,
    indices: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    return_values: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The indices of the k largest entries of each row, exact; with ``block_table`` their slots in a paged cache.

    Entries are ordered by value, with NaN below all others and -0 equal to 0; ties are resolved in favor of the lower
    index. So the result does not depend on the batch or the implementation. If a row has at most k entries, all are
    selected. values has no backward pass: a warning is given once if gradients are enabled and ``logits`` requires one.

    Args:
        logits: [rows, width], float32 or bf16, last stride 1. Either may be 0.
        k: 1 to 4096.
        start: int32 or int64 [rows], the first column of each row, clamped to 0; None means 0. Indices are relative to
            it.
        end: int32 or int64 [rows], the end (exclusive) of each row; or [rows / next_n], one per request: the last of
            its next_n rows ends there, and each other row one column before the next. None means width. Elements
            outside a row are not read.
        next_n: rows per request.
        block_table: int32 or int64 [b, max_pages]. If given, the results are the slots (page · page_size + offset) of
            the selected indices, as ``index_convert`` gives them in a launch of its own: still in ascending order of
            index.
        page_size: tokens in a page of ``block_table``; given with it.
        request_ids: int32 or int64 [rows], the request of each row, a row of ``block_table``. If None, row // next_n.
        sort: sort by descending value (ties by ascending index) instead of by ascending index; not with
            ``block_table``.
        indices: int32 [rows, k] with last stride 1 to write to.
        values: float32 [rows, k] with last stride 1 to write to: the selected entries; it must not overlap ``logits``.
        return_values: whether to return values.
        backend: "hopper", "portable" or "reference"; None selects one.

    Returns:
        indices int32 [rows, k], padded with -1. With ``block_table`` slots instead, -1 also for an index outside the
        table or on a negative page, a request outside the table, and a slot beyond int32. With ``return_values`` or
        ``values`` also values float32 [rows, k], padded with -inf.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments; a backend
            that cannot run the call.
    """
    checks.flag("sort", sort)
    checks.flag("return_values", return_values)
    with_values = return_values or values is not None
    if sort and block_table is not None:
        raise ValueError("sort must be False with block_table, got True")
    columns, table = (start, end, next_n), (block_table, page_size, request_ids)
    results = _unsorted(logits, k, *columns, *table, indices, values, with_values or sort, backend)
    if with_values:
        gradients.warn_if_dropped(OPERATION, logits)
    if sort:
        _sort(*results)
    return (results[0], results[1]) if with_values else results[0]


@repeats_launches
def _unsorted(
    logits: torch.Tensor,
    k: int,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    next_n: int,
    block_table: torch.Tensor | None,
    page_size: int | None,
    request_ids: torch.Tensor | None,
    indices: torch.Tensor | None,
    values: torch.Tensor | None,
    with_values: bool,
    backend: str | None,
) -> tuple[torch.Tensor, ...]:
    """The indices, and the values if ``values`` or ``return_values`` is given."""
    checks.tensor("logits", logits, ("rows", "width"), LOGIT_DTYPES, may_be_empty=2)
    rows, width = logits.shape
    device = logits.device
    k, next_n = checks.positive_int("k", k), checks.positive_int("next_n", next_n)
    if k > MAX_K:
        raise ValueError(f"k must be at most {MAX_K}, got {k}")
    if rows % next_n:
        raise ValueError(f"next_n must divide the {rows} rows of logits, got {next_n}")
    if start is not None:
        checks.indices("start", start, (rows,), device)
    if end is not None:
        per_row = checks.is_strided(end) and end.shape == (rows,)
        ends = rows if per_row else rows // next_n
        checks.indices("end", end, (ends,), device)
    page_size = _check_table(rows, next_n, block_table, page_size, request_ids, device)
    indices = checks.output_or_new("indices", indices, (rows, k), torch.int32, device)
    if values is not None or with_values:
        values = checks.output_or_new("values", values, (rows, k), torch.float32, device, logits=logits)
    backend = dispatch.select(
        dispatch.CallSpec(OPERATION, device, logits.dtype, rows=rows, columns=width, k=k), backend
    )
    if rows and width:
        table = block_table, page_size, request_ids
        _topk(TopkParams(logits, start, end, next_n, indices, values, *table), backend)
    elif rows:
        indices.fill_(-1)
        if values is not None:
            values.fill_(-torch.inf)
    return (indices,) if values is None else (indices, values)


def _check_table(
    rows: int,
    next_n: int,
    block_table: torch.Tensor | None,
    page_size: int | None,
    request_ids: torch.Tensor | None,
    device: torch.device,
) -> int:
    """Check the block table; returns the page size, 1 without a table."""
    if block_table is None:
        for name, value in (("page_size", page_size), ("request_ids", request_ids)):
            if value is not None:
                raise ValueError(f"{name} must be given only with block_table")
        return 1
    may_be_empty = 0 if rows else 2
    checks.tensor(
        "block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES, device, may_be_empty=may_be_empty
    )
    page_size = checks.positive_int("page_size", page_size)
    if page_size > _MAX_PAGE_SIZE:
        raise ValueError(f"page_size must be at most {_MAX_PAGE_SIZE}, got {page_size}")
    requests = block_table.shape[0]
    if request_ids is not None:
        checks.indices("request_ids", request_ids, (rows,), device)
        value_checks.entries("request_ids", request_ids, requests)
    elif rows != next_n * requests:
        raise ValueError(
            f"logits must have {next_n} rows for each of block_table's {requests} requests (or request_ids must be "
            f"given), got {rows}"
        )
    return page_size


@register_op(OPERATION, mutates=("indices", "values"))
@dispatch.implemented(OPERATION, hopper=_refuses_hopper, portable=refusals.triton)
def _topk(params: TopkParams, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.topk.hopper.launch import topk
    elif backend == "portable":
        from flashlatte.ops.topk.portable.launch import topk
    else:
        from flashlatte.ops.topk.reference import topk

    topk(params)


def _sort(indices: torch.Tensor, values: torch.Tensor) -> None:
    """Sort rows, which are in ascending order of index, in place by value, with padding last."""
    rank = values.masked_fill(values.isnan(), -torch.inf)
    # NaN after -inf, and padding after NaN.
    kind = values.isnan().to(torch.int8) + 2 * (indices < 0).to(torch.int8)
    order = rank.sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, kind.gather(1, order).sort(dim=1, stable=True).indices)
    indices.copy_(indices.gather(1, order))
    values.copy_(values.gather(1, order))
