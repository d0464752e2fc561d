"""SGLang's sparse-attention indexer: logits functions and top-k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashlatte import deep_gemm
from flashlatte.integrations.sglang.flash_mla_module import NOT_IMPORTABLE
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.topk import topk as select_topk
from flashlatte.runtime import checks, machine
from flashlatte.runtime.block_tables import whole_rows

_MAX_TOPK = 4096


def resolve_fp8_mqa_logits_fn(original: Callable[[], Callable[..., torch.Tensor]]) -> Callable[..., torch.Tensor]:
    return _resolve(original, deep_gemm.fp8_mqa_logits)


def resolve_fp8_paged_mqa_logits_fn(original: Callable[[], Callable[..., torch.Tensor]]) -> Callable[..., torch.Tensor]:
    return _resolve(original, deep_gemm.fp8_paged_mqa_logits)


def resolve_paged_mqa_logits_metadata_fn(
    original: Callable[[], Callable[..., torch.Tensor]],
) -> Callable[..., torch.Tensor]:
    return original() if _schedule_is_read() else _resolve(original, deep_gemm.get_paged_mqa_logits_metadata)


def get_paged_mqa_logits_metadata(
    original: Callable[..., torch.Tensor],
    context_lens: torch.Tensor,
    block_kv: int,
    num_sms: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Zeros, or DeepGEMM's own schedule if another kernel may read it."""
    if not _schedule_is_read():
        return deep_gemm.get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices)
    # Earlier versions of DeepGEMM have no indices argument.
    return original(context_lens, block_kv, num_sms, *(() if indices is None else (indices,)))


def topk_func(
    original: Callable[..., torch.Tensor],
    self: Any,
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Top-k indices of each row, in place of sgl-kernel's. Other implementations that the user selects are kept.

    Args:
        score: float32 or bf16 [rows, width].
        lengths: int32 or int64 [rows], number of columns of each row.
        topk: number of indices to select.
        row_starts: int32 or int64 [rows], the first column of each row; 0 if None.

    Returns:
        int32 [rows, topk], relative to the row's first column, padded with -1.
    """
    if not self.is_sgl_kernel() or topk > _MAX_TOPK:
        return original(self, score, lengths, topk, row_starts=row_starts)
    return _select(score, lengths, topk, row_starts)


def fast_topk_transform_fused(
    original: Callable[..., torch.Tensor],
    score: torch.Tensor,
    lengths: torch.Tensor,
    page_table_size_1: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Top-k of each row as cache slots, for prefill with logits over the batch's contiguous keys.

    Args:
        score: float32 or bf16 [rows, width].
        lengths: int32 or int64 [rows], number of columns of each row.
        page_table_size_1: int32 or int64 [b, max_tokens], the slot of each token; a slice as in
            ``topk_transform_paged_v2``.
        cu_seqlens_q: int32 or int64 [b + 1], row boundaries of the requests.
        topk: number of slots to select.
        row_starts: int32 or int64 [rows], the first column of each row's request; 0 if None.

    Returns:
        int32 [rows, topk], padded with -1.
    """
    if topk > _MAX_TOPK:
        return original(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts)
    rows, requests = score.shape[0], cu_seqlens_q.shape[0] - 1
    request_ids = None
    # Without row_starts and with as many requests as rows, each request has one row, as in SGLang's kernel.
    if row_starts is not None or rows != requests:
        row = torch.arange(rows, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
        request_ids = torch.searchsorted(cu_seqlens_q[1:], row, right=True)
    with checks.naming(block_table="page_table_size_1"):
        return _select(
            score,
            lengths,
            topk,
            row_starts,
            block_table=whole_rows(page_table_size_1),
            page_size=1,
            request_ids=request_ids,
        )


def fast_topk_transform_ragged_fused(
    original: Callable[..., torch.Tensor],
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk_indices_offset: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Top-k of each row as indices into the batch's contiguous keys, for prefill with rows split over ranks.

    Args:
        score, lengths, topk, row_starts: as for ``fast_topk_transform_fused``.
        topk_indices_offset: int32 or int64 [rows], added to the selected indices, which are relative to the row's first
            column.

    Returns:
        int32 [rows, topk], padded with -1.
    """
    if topk > _MAX_TOPK:
        return original(score, lengths, topk_indices_offset, topk, row_starts)
    return _add_offsets(_select(score, lengths, topk, row_starts), topk_indices_offset)


def topk_transform_paged_v2(
    original: Callable[..., None],
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor | None,
    out_page_indices: torch.Tensor,
    page_size: int,
    metadata: torch.Tensor | None,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Top-k of each row as slots of its pages.

    Args:
        scores: float32 or bf16 [rows, width].
        seq_lens: int32 or int64 [rows].
        page_tables: int32 or int64 [rows, max_pages]; None returns the selected columns themselves. A slice of a wider
            buffer's columns stands for the buffer's whole rows, as in SGLang's kernels.
        out_page_indices: int32 [rows, k], written, padded with -1.
        page_size: tokens in a page.
        metadata: unused.
        out_raw_indices: int32 [rows, k], written with the selected columns if given.
    """
    k = out_page_indices.shape[1]
    if k > _MAX_TOPK:
        original(scores, seq_lens, page_tables, out_page_indices, page_size, metadata, out_raw_indices)
        return
    with checks.naming(logits="scores", end="seq_lens", block_table="page_tables"):
        if page_tables is None or out_raw_indices is None:
            table = {} if page_tables is None else {"block_table": whole_rows(page_tables), "page_size": page_size}
            select_topk(scores, k, end=seq_lens, indices=out_page_indices, **table)
            if out_raw_indices is not None:
                out_raw_indices.copy_(out_page_indices)
        else:
            select_topk(scores, k, end=seq_lens, indices=out_raw_indices)
            index_convert(out_raw_indices, whole_rows(page_tables), page_size, slots=out_page_indices)


def topk_transform_ragged_v2(
    original: Callable[..., None],
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out_offsets: torch.Tensor,
    out_indices: torch.Tensor,
    row_starts: torch.Tensor | None = None,
) -> None:
    """Top-k of columns row_starts to row_starts + seq_lens of each row, as indices into the batch's contiguous keys.

    Args:
        scores: float32 or bf16 [rows, width]; not modified.
        seq_lens: int32 or int64 [rows], number of columns of each row.
        out_offsets: int32 or int64 [rows], added to the selected indices, which are relative to the row's first column.
        out_indices: int32 [rows, k], written, padded with -1.
        row_starts: int32 or int64 [rows]; 0 if None.
    """
    k = out_indices.shape[1]
    if k > _MAX_TOPK:
        original(scores, seq_lens, out_offsets=out_offsets, out_indices=out_indices, row_starts=row_starts)
        return
    with checks.naming(logits="scores", end="seq_lens", start="row_starts", indices="out_indices"):
        select_topk(scores, k, start=row_starts, end=_ends(seq_lens, row_starts), indices=out_indices)
    _add_offsets(out_indices, out_offsets)


def _resolve(
    original: Callable[[], Callable[..., torch.Tensor]], ours: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """The function that SGLang resolves (selected by a flag, or DeepGEMM's, which is hooked), or FlashLatte's if
    DeepGEMM is missing."""
    try:
        return original()
    except NOT_IMPORTABLE:
        return ours


def _schedule_is_read() -> bool:
    """Whether ``--dsa-paged-mqa-logits-backend cutedsl``, which reads DeepGEMM's schedule, supports this GPU."""
    return machine.compute_capability(torch.device("cuda"))[0] == 10


def _select(
    score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None, **table: Any
) -> torch.Tensor:
    """``table``: ``topk``'s arguments of a block table, if slots are to be returned."""
    with checks.naming(logits="score", end="lengths", start="row_starts", k="topk"):
        return select_topk(score, topk, start=row_starts, end=_ends(lengths, row_starts), **table)


def _add_offsets(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Add each row's offset in place to its indices [rows, k] that are not -1."""
    return indices.add_(torch.where(indices >= 0, offsets.unsqueeze(1), 0))


def _ends(lengths: torch.Tensor, row_starts: torch.Tensor | None) -> torch.Tensor:
    return lengths if row_starts is None else row_starts + lengths
