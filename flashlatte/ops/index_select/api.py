"""``index_select`` and ``paged_index_select``: logits and top-k, in chunks of rows whose logits fit a workspace.

Composed of the operations ``index_logits`` and ``topk``.
"""

from __future__ import annotations

import torch

from flashlatte.ops.index_logits import index_logits, paged_index_logits
from flashlatte.ops.index_logits.api import check_paged
from flashlatte.ops.topk import topk
from flashlatte.runtime import checks

# Default size of the logits of a chunk, also in layers. With an eighth of it, 4,096 queries over 32,768 keys take 2,496
# µs instead of 2,237 (H200).
WORKSPACE_BYTES = 512 * 2**20
LOGIT_BYTES = 4


def index_select(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    num_selected: int,
    *,
    k_scale: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    request_ids: torch.Tensor | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    indices: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Select the ``num_selected`` keys with the largest index logits in each query's range, exactly; for prefill.

    Args:
        q, k, weights, key_start, key_end, k_scale: as for ``index_logits``.
        num_selected: 1 to 4096.
        block_table: int32 or int64 [b, max_pages]. If given, the results are slots (page · page_size + offset) of this
            table instead of positions, still in ascending order of position.
        page_size: tokens in a page of ``block_table``; given with it.
        request_ids: int32 or int64 [M], the request of each query, a row of ``block_table``. None: each query is a
            request.
        workspace_bytes: maximum bytes of the logits of a chunk; a chunk has at least one row.
        indices: int32 [M, num_selected] to write to.
        backend: backend of the logits: "hopper", "portable" or "reference"; None selects one. "reference" and
            "portable" also apply to the top-k.

    Returns:
        int32 [M, num_selected]: positions relative to key_start, ascending, then -1; or their slots, -1 also for a
        position without one (``topk``). Ties are resolved in favor of the lower position. If a range has at most
        ``num_selected`` keys, all are selected.

    Raises:
        TypeError, ValueError: as ``index_logits`` and ``topk``.
    """
    workspace_bytes = checks.positive_int("workspace_bytes", workspace_bytes)
    for name, value in (("q", q), ("k", k), ("weights", weights), ("key_start", key_start), ("key_end", key_end)):
        if checks.given(name, value).dim() == 0:
            raise TypeError(f"{name} must be a tensor with at least one axis, got a scalar")
    rows, num_keys = q.shape[0], k.shape[0]
    for name, value in (("weights", weights), ("key_start", key_start), ("key_end", key_end)):
        if value.shape[0] != rows:
            raise ValueError(f"{name} must have q's {rows} rows, got {value.shape[0]}")
    per_query = None
    if block_table is not None:
        if request_ids is None:
            checks.tensor("block_table", block_table, (rows, "max_pages"), checks.INDEX_DTYPES, may_be_empty=2)
            per_query = block_table
        else:
            checks.indices("request_ids", request_ids, (rows,))
    indices = _indices(indices, rows, num_selected, q)
    at_a_time = max(1, workspace_bytes // (LOGIT_BYTES * max(num_keys, 1)))
    # At least one iteration, also without rows, because the operations check the arguments.
    for begin in range(0, max(rows, 1), at_a_time):
        part = slice(begin, begin + at_a_time)
        logits = index_logits(
            q[part],
            k,
            weights[part],
            key_start[part],
            key_end[part],
            k_scale=k_scale,
            clean=False,
            backend=backend,
        )
        topk(
            logits,
            num_selected,
            start=key_start[part],
            end=key_end[part],
            block_table=block_table if per_query is None else per_query[part],
            page_size=page_size,
            request_ids=None if request_ids is None else request_ids[part],
            indices=indices[part],
            backend=_shared(backend),
        )
    return indices


def paged_index_select(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    num_selected: int,
    *,
    slots: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    indices: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``index_select`` over a paged cache of index keys, for the last tokens of each request; decode.

    Args:
        q, cache, weights, cache_seqlens, block_table: as for ``paged_index_logits``.
        num_selected: 1 to 4096.
        slots: return slots (page · page_size + offset) of this block table instead of positions.
        workspace_bytes: maximum bytes of the logits of a chunk; a chunk has at least one request.
        indices: int32 [b · next_n, num_selected] to write to.
        backend: as for ``index_select``.

    Returns:
        int32 [b · next_n, num_selected]: positions, ascending, or their slots; then -1. A key whose page is not in the
        cache is all zeros, and its slot is outside the cache: -1, or beyond the last slot.

    Raises:
        TypeError, ValueError: as ``paged_index_logits`` and ``topk``.
    """
    workspace_bytes = checks.positive_int("workspace_bytes", workspace_bytes)
    checks.flag("slots", slots)
    cache, _ = check_paged(q, cache, weights, cache_seqlens, block_table)
    requests, next_n = q.shape[:2]
    page_size = cache.shape[1]
    width = block_table.shape[1] * page_size
    indices = _indices(indices, requests * next_n, num_selected, q)
    at_a_time = max(1, workspace_bytes // (LOGIT_BYTES * next_n * max(width, 1)))
    for begin in range(0, max(requests, 1), at_a_time):
        part = slice(begin, begin + at_a_time)
        rows = slice(begin * next_n, (begin + at_a_time) * next_n)
        lengths = cache_seqlens[part]
        logits = paged_index_logits(
            q[part], cache, weights[rows], lengths, block_table[part], clean=False, backend=backend
        )
        topk(
            logits,
            num_selected,
            end=lengths if lengths.dim() == 1 else lengths.flatten(),
            next_n=next_n,
            block_table=block_table[part] if slots else None,
            page_size=page_size if slots else None,
            indices=indices[rows],
            backend=_shared(backend),
        )
    return indices


def _indices(indices: torch.Tensor | None, rows: int, num_selected: int, q: torch.Tensor) -> torch.Tensor:
    num_selected = checks.positive_int("num_selected", num_selected)
    return checks.output_or_new("indices", indices, (rows, num_selected), torch.int32, q.device)


def _shared(backend: str | None) -> str | None:
    """The backend of top-k: "portable" or "reference" if given for the logits, else None."""
    return backend if backend in ("portable", "reference") else None
