"""``index_workspace``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.ops.index_workspace.reference import IndexWorkspaceParams
from flashlatte.runtime import checks, dispatch, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "index_workspace"
# A multiple of the tile sizes of sparse prefill.
ALIGNMENT = 128
MAX_ROWS = 2**31 - 1


@repeats_launches
def index_workspace(
    indices: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    total_tokens: int,
    *,
    window: int,
    ratio: int,
    workspace_rows: int,
    window_row: int,
    topk: int | None = None,
    gather_lens: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query token, the rows of a workspace that it attends to: selected groups first, then its window.

    Request i has ``workspace_rows`` rows of the workspace: row g holds its group g of ``ratio`` tokens, compressed, and
    row ``window_row + p - (seq_lens[i] - gather_lens[i])`` its token p; only the last gather_lens[i] tokens are
    present. A token at position p attends to the first min((p + 1) // ratio, topk) entries of its row of ``indices``
    and the tokens p - window + 1 to p. The result is the selection for ``sparse_prefill``.

    Args:
        indices: int32 or int64 [T, topk], groups of the token's own request; below 0 for none. None: all groups up to
            ``topk``.
        cu_seqlens_q: int32 or int64 [b + 1]: request i has tokens cu_seqlens_q[i] to cu_seqlens_q[i + 1], counted from
            cu_seqlens_q[0]. They are the last of its seq_lens[i].
        seq_lens: int32 or int64 [b].
        total_tokens: T. Tokens of no request have no entries.
        window: tokens of the window, including the query token; 0 for none.
        ratio: tokens of a group.
        workspace_rows, window_row: layout of the workspace, see above.
        topk: if ``indices`` is None, the maximum number of groups of a token.
        gather_lens: int32 or int64 [b], up to seq_lens; all tokens if None.
        backend: "portable" or "reference"; None selects one.

    Returns:
        rows int32 [T, topk + window rounded up to a multiple of 128]; -1 after a token's entries, for tokens that are
        not gathered, and for rows outside the request's ``workspace_rows`` or beyond int32. And counts int32 [T]: the
        number of a token's entries, the topk_length of ``sparse_prefill``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    total_tokens = checks.positive_int("total_tokens", total_tokens, or_zero=True)
    checks.indices("seq_lens", seq_lens, ("b",))
    requests, device = seq_lens.shape[0], seq_lens.device
    checks.indices("cu_seqlens_q", cu_seqlens_q, (requests + 1,), device)
    if gather_lens is not None:
        checks.indices("gather_lens", gather_lens, (requests,), device)
    if (indices is None) == (topk is None):
        raise ValueError(f"exactly one of indices and topk must be given, got {'neither' if topk is None else 'both'}")
    if indices is not None:
        checks.tensor("indices", indices, (total_tokens, "topk"), checks.INDEX_DTYPES, device)
        topk = indices.shape[1]
    topk = checks.positive_int("topk", topk)
    window = checks.positive_int("window", window, or_zero=True)
    ratio = checks.positive_int("ratio", ratio)
    workspace_rows = checks.positive_int("workspace_rows", workspace_rows)
    if workspace_rows > MAX_ROWS:
        raise ValueError(f"workspace_rows must be at most {MAX_ROWS}, as rows are int32, got {workspace_rows}")
    if checks.positive_int("window_row", window_row, or_zero=True) > workspace_rows:
        raise ValueError(f"window_row must be at most workspace_rows {workspace_rows}, got {window_row}")
    width = -(-(topk + window) // ALIGNMENT) * ALIGNMENT
    rows = torch.empty(total_tokens, width, dtype=torch.int32, device=device)
    counts = torch.empty(total_tokens, dtype=torch.int32, device=device)
    backend = dispatch.select(dispatch.CallSpec(OPERATION, device, rows.dtype), backend)
    if total_tokens:
        params = IndexWorkspaceParams(
            indices=indices,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            gather_lens=gather_lens,
            topk=topk,
            window=window,
            ratio=ratio,
            workspace_rows=workspace_rows,
            window_row=window_row,
            rows=rows,
            counts=counts,
        )
        _index_workspace(params, backend)
    return rows, counts


@register_op(OPERATION, mutates=("rows", "counts"))
@dispatch.implemented(OPERATION, portable=refusals.triton)
def _index_workspace(params: IndexWorkspaceParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.index_workspace.portable import index_workspace
    else:
        from flashlatte.ops.index_workspace.reference import index_workspace

    index_workspace(params)
