"""vLLM's operations of the sparse-attention indexer: key cache and top-k."""

from __future__ import annotations

import torch

from flashlatte.integrations.vllm.ops.first_rows import first_rows, request_rows
from flashlatte.ops.index_quantize import index_gather, index_quantize
from flashlatte.ops.topk import topk
from flashlatte.ops.topk.api import LOGIT_DTYPES
from flashlatte.runtime import checks


def indexer_k_quant_and_cache(
    k: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """Quantize index keys to e4m3 with one scale a token, and write them to a paged cache: ``index_quantize``.

    Args:
        k: [T, head_dim], bf16, fp16 or float32.
        kv_cache: uint8 [pages, page_size, head_dim + 4], written.
        slot_mapping: int32 or int64 [n], n ≥ T, page · page_size + offset; a slot outside the cache skips its token.
        quant_block_size: head_dim.
        kv_cache_dtype: "ue8m0" rounds scales up to powers of two, other names keep them exact. "mxfp8" (0.33), with
            one-byte scales, is not supported.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    head_dim = checks.tensor("k", k, ("T", "head_dim"), checks.FLOAT_DTYPES, may_be_empty=1).shape[1]
    if checks.integer("quant_block_size", quant_block_size) != head_dim:
        raise ValueError(f"quant_block_size must be k's head dim {head_dim}, one scale a token, got {quant_block_size}")
    checks.instance("kv_cache_dtype", kv_cache_dtype, str)
    if kv_cache_dtype == "mxfp8":
        raise ValueError("kv_cache_dtype must be 'ue8m0' or an fp8 name with float32 scales, got 'mxfp8'")
    rounding = "power_of_two" if kv_cache_dtype == "ue8m0" else "exact"
    with checks.naming(cache="kv_cache"):
        checks.indices("slot_mapping", slot_mapping, ("n",), may_be_empty=1)
        index_quantize(kv_cache, slot_mapping[: k.shape[0]], k, scale_rounding=rounding)


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Gather the quantized index keys of several requests: ``index_gather``.

    Args:
        kv_cache: uint8 [pages, page_size, head_dim + 4].
        dst_k: one-byte dtype [T, head_dim], contiguous, written; rows from cu_seq_lens[b] on stay unchanged.
        dst_scale: uint8 [T, 4], or float32 [T] or [T, 1], contiguous, written.
        block_table: int32 or int64 [b or more, max_pages].
        cu_seq_lens: int32 or int64 [b + 1].

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    for name, value, dtypes in (
        ("dst_k", dst_k, (torch.uint8, torch.int8, torch.float8_e4m3fn)),
        ("dst_scale", dst_scale, (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float32)),
    ):
        checks.given(name, value)
        if value.dtype not in dtypes:
            accepted = checks.dtype_names(dtypes)
            raise TypeError(f"{name} must be {accepted}, got {checks.dtype_names([value.dtype])}")
        if not value.is_contiguous() or not value.dim():
            raise ValueError(f"{name} must be contiguous with an axis of rows, got strides {value.stride()}")
    if dst_scale.storage_offset() * dst_scale.element_size() % 4:
        raise ValueError(f"dst_scale must begin at a multiple of 4 bytes, got offset {dst_scale.storage_offset()}")
    rows = dst_k.shape[0]
    if dst_scale.numel() * dst_scale.element_size() != 4 * rows or dst_scale.shape[:1] != (rows,):
        raise ValueError(
            f"dst_scale must have 4 bytes for each of dst_k's {rows} rows, got {checks.dtype_names([dst_scale.dtype])} "
            f"{list(dst_scale.shape)}"
        )
    with checks.naming(cache="kv_cache", cu_seqlens="cu_seq_lens", values="dst_k", scales="dst_scale"):
        index_gather(
            kv_cache,
            request_rows(block_table, cu_seq_lens),
            cu_seq_lens,
            rows,
            head_dim=dst_k.shape[-1],
            values=dst_k.view(torch.float8_e4m3fn),
            # Flat first: a single row may have any stride.
            scales=dst_scale.view(-1).view(torch.float32),
        )


def top_k_per_row_prefill(
    logits: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Indices of the k largest logits of each row between two bounds: ``topk``, in ascending order.

    Args:
        logits: float32 or bf16 [T, width], T ≥ num_rows.
        cu_seqlen_ks, cu_seqlen_ke: int32 or int64 [T], the range of columns of each row, exclusive of the end.
        raw_topk_indices: int32 [T, k], k ≥ topk_tokens, written: relative to the row's first column, padded with -1.
        num_rows: number of rows to process.
        stride0, stride1: strides of ``logits``; the second is 1.
        topk_tokens: 1 to 4096.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape, stride or device.
    """
    _check_strides(logits, stride0, stride1)
    with checks.naming(start="cu_seqlen_ks", end="cu_seqlen_ke", indices="raw_topk_indices", k="topk_tokens"):
        topk(
            first_rows("logits", logits, "num_rows", num_rows),
            topk_tokens,
            start=first_rows("cu_seqlen_ks", cu_seqlen_ks, "num_rows", num_rows),
            end=first_rows("cu_seqlen_ke", cu_seqlen_ke, "num_rows", num_rows),
            indices=_output_slice(raw_topk_indices, num_rows, topk_tokens),
        )


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Indices of the k largest logits of each row: ``topk``, in ascending order.

    Args:
        logits: float32 or bf16 [T, width], T ≥ num_rows, next_n rows a request.
        next_n: rows of a request.
        seq_lens: int32 or int64 [b], the length of each request's last row (row t has next_n - 1 - t columns fewer); or
            [b, next_n], the length of each row. There may be more requests than num_rows / next_n.
        raw_topk_indices, num_rows, stride0, stride1, topk_tokens: as ``top_k_per_row_prefill``.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape, stride or device.
    """
    _check_strides(logits, stride0, stride1)
    chosen = first_rows("logits", logits, "num_rows", num_rows)
    # One-dimensional lengths are one a request, even if there are as many as rows.
    each = checks.positive_int("next_n", next_n) if checks.given("seq_lens", seq_lens).dim() == 1 else 1
    with checks.naming(end="seq_lens", indices="raw_topk_indices", k="topk_tokens"):
        topk(
            chosen,
            topk_tokens,
            end=first_rows("seq_lens", seq_lens.reshape(-1), "num_rows", chosen.shape[0] // each),
            next_n=next_n,
            indices=_output_slice(raw_topk_indices, num_rows, topk_tokens),
        )


def persistent_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    output: torch.Tensor,
    workspace: torch.Tensor | None,
    k: int,
    max_seq_len: int,
) -> None:
    """Indices of the k largest logits of each row: ``topk``, in ascending order.

    NaN counts as the smallest logit; vLLM 0.33 treats it as the largest.

    Args:
        logits: float32 or bf16 [rows, width].
        lengths: int32 or int64 with ``rows`` elements in any shape: the number of columns of each row.
        output: int32 [rows, k], written, padded with -1.
        workspace: unused.
        k: 1 to 4096.
        max_seq_len: unused.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    checks.tensor("logits", logits, ("rows", "width"), LOGIT_DTYPES, may_be_empty=2)
    rows = logits.shape[0]
    if checks.given("lengths", lengths).numel() != rows:
        raise ValueError(
            f"lengths must have one element for each of the {rows} rows of logits, got {list(lengths.shape)}"
        )
    with checks.naming(end="lengths", indices="output"):
        topk(logits, k, end=lengths.reshape(-1), indices=checks.given("output", output))


cooperative_topk = persistent_topk


def _output_slice(raw_topk_indices: torch.Tensor, num_rows: int, topk_tokens: int) -> torch.Tensor:
    """The rows and columns of ``raw_topk_indices`` to write."""
    topk_tokens = checks.positive_int("topk_tokens", topk_tokens)
    rows = first_rows("raw_topk_indices", raw_topk_indices, "num_rows", num_rows)
    return rows[:, :topk_tokens] if rows.dim() == 2 else rows


def _check_strides(logits: torch.Tensor, stride0: int, stride1: int) -> None:
    logits = checks.given("logits", logits)
    if (checks.integer("stride0", stride0), checks.integer("stride1", stride1)) != logits.stride():
        raise ValueError(f"stride0 and stride1 must be logits' {logits.stride()}, got {stride0} and {stride1}")
