"""DeepGEMM's logits over all keys, and its schedule metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashlatte.deep_gemm.operands import (
    IndexQuery,
    check_pair,
    float32_weights,
    keys,
    logits_dtype_of,
    query,
    refuse_paged_mxfp8,
)
from flashlatte.ops.index_logits import index_logits, paged_index_logits
from flashlatte.runtime import checks, machine
from flashlatte.runtime.block_tables import whole_rows

# Set by set_num_sms; 0 for all of the GPU.
_num_sms = 0


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """``fp8_fp4_mqa_logits`` for float8_e4m3fn queries ``q`` [M, H, D], with float32 logits."""
    return fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def fp8_fp4_mqa_logits(
    q: IndexQuery,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool | int | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    schedule_meta: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Logits of queries against contiguous index keys, each query over its own range of keys.

    Two argument orders are accepted. The type of the argument after ``cu_seq_len_k_end`` determines the order: an int
    is ``max_seqlen_k`` of DeepGEMM 2.8, ``(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k,
    schedule_meta=None)``; a bool is ``clean_logits`` of earlier versions, the signature above.

    Args:
        q: (values, scales), or values alone. fp8: float8_e4m3fn [M, H, D] and None; mxfp8: float8_e4m3fn [M, H, 128]
            and int32 [M, H], four E8M0 scales in each; mxfp4: one-byte [M, H, 64] and int32 [M, H].
        kv: (values, scales). fp8: float8_e4m3fn [N, D] and float32 [N]; mxfp8: float8_e4m3fn [N, 128] and int32 [N];
            mxfp4: one-byte [N, 64] and int32 [N].
        weights: float32 or bf16 [M, H].
        cu_seq_len_k_start, cu_seq_len_k_end: int32 [M], the range of keys of each query.
        clean_logits: fill columns outside a query's range with -inf; otherwise they are undefined. Default True; in the
            argument order of DeepGEMM 2.8 False.
        max_seqlen_k: if above 0, rows are compressed to [M, max_seqlen_k], each from its query's first key. With 0, the
            default, rows cover all keys.
        logits_dtype: float32 or bf16. Default: float32 if ``clean_logits`` is given, else the dtype of ``weights``, as
            in DeepGEMM 2.8 (bf16 of both on SM100, float32 elsewhere).
        schedule_meta: unused; the result of ``get_mqa_logits_metadata``, or None.
        backend: "hopper", "portable" or "reference"; None selects one.

    Returns:
        [M, N], or [M, max_seqlen_k]; rows begin at multiples of 128 bytes.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    if isinstance(clean_logits, int) and not isinstance(clean_logits, bool):
        # DeepGEMM 2.8 by position: max_seqlen_k, then schedule_meta.
        if isinstance(max_seqlen_k, int) or (max_seqlen_k is not None and schedule_meta is not None):
            raise TypeError(f"clean_logits must be True or False if max_seqlen_k is given, got {clean_logits}")
        _check_schedule(schedule_meta if max_seqlen_k is None else max_seqlen_k)
        clean_logits, max_seqlen_k = None, clean_logits
        clean = False
    else:
        clean = True if clean_logits is None else clean_logits
    dtype = logits_dtype_of(logits_dtype, weights, clean_logits is None)
    check_pair("kv", kv)
    values, (k, k_scale) = query(q), keys(*kv)
    max_keys = checks.positive_int("max_seqlen_k", 0 if max_seqlen_k is None else max_seqlen_k, or_zero=True)
    width = max_keys or (k.shape[0] if k.dim() else 0)
    names = {"k": "kv[0]", "k_scale": "kv[1]", "key_start": "cu_seq_len_k_start", "key_end": "cu_seq_len_k_end"}
    with checks.naming(**names, clean="clean_logits"):
        return index_logits(
            values,
            k,
            float32_weights(weights),
            cu_seq_len_k_start,
            cu_seq_len_k_end,
            k_scale=k_scale,
            clean=clean,
            max_keys=max_keys or None,
            dtype=dtype,
            out=_aligned_rows(values.shape[:1], width, dtype, values.device),
            backend=backend,
        )


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """``fp8_fp4_paged_mqa_logits`` for float8_e4m3fn queries ``q`` [b, next_n, H, D], with float32 logits."""
    return fp8_fp4_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, indices=indices
    )


def fp8_fp4_paged_mqa_logits(
    q: IndexQuery,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool | torch.Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    indices: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Logits of queries against a paged cache of index keys.

    Two argument orders are accepted. The type of the argument after ``max_context_len`` determines the order: a tensor
    or None is ``indices`` of DeepGEMM 2.8, ``(…, schedule_meta, max_context_len, indices=None)``; a bool is
    ``clean_logits`` of earlier versions, the signature above.

    Args:
        q: (values, scales), or values alone. fp8: float8_e4m3fn [b, next_n, H, D] and None; mxfp4: one-byte
            [b, next_n, H, 64] and int32 [b, next_n, H].
        kv_cache: uint8 [pages, page_size, 1, width], width D + 4 (fp8) or 68 (mxfp4). Pages of mxfp8 keys, which
            have the width of fp8 pages, are not supported.
        weights: float32 or bf16 [b · next_n, H].
        context_lens: int32 [b]: token t covers the first context_lens - next_n + t + 1 keys; or [b, next_n].
        block_table: int32 [b, max_pages]. A slice of a wider buffer's columns stands for the buffer's whole rows, as in
            DeepGEMM.
        schedule_meta: unused; the result of ``get_paged_mqa_logits_metadata``, or None.
        max_context_len: columns of the result.
        clean_logits: fill columns outside a query's range with -inf; otherwise they are undefined. Default False.
        logits_dtype: as for ``fp8_fp4_mqa_logits``.
        indices: unused; in DeepGEMM the request of each row, to group rows.
        backend: "hopper", "portable" or "reference"; None selects one.

    Returns:
        [b · next_n, max_context_len]; rows begin at multiples of 128 bytes.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    if isinstance(clean_logits, torch.Tensor):
        if indices is not None:
            raise TypeError("clean_logits must be True or False if indices is given, got a tensor")
        clean_logits = None
    dtype = logits_dtype_of(logits_dtype, weights, clean_logits is None)
    max_context_len = checks.positive_int("max_context_len", max_context_len)
    refuse_paged_mxfp8(q)
    values = query(q)
    with checks.naming(cache="kv_cache", cache_seqlens="context_lens", clean="clean_logits"):
        return paged_index_logits(
            values,
            kv_cache,
            float32_weights(weights),
            context_lens,
            whole_rows(block_table),
            max_keys=max_context_len,
            clean=False if clean_logits is None else clean_logits,
            dtype=dtype,
            out=_aligned_rows(values.shape[:2], max_context_len, dtype, values.device),
            backend=backend,
        )


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Zeros with the shape of DeepGEMM's schedule, int32 [num_sms + 1, 2], on the device of ``context_lens``.

    FlashLatte splits the work in each call. ``block_kv`` and ``indices`` are unused.

    Raises:
        TypeError, ValueError: ``context_lens`` is not a tensor, or num_sms is below 1.
    """
    device = checks.given("context_lens", context_lens).device
    return torch.zeros(checks.positive_int("num_sms", num_sms) + 1, 2, dtype=torch.int32, device=device)


def get_mqa_logits_metadata(
    cu_seq_len_k_start: torch.Tensor, cu_seq_len_k_end: torch.Tensor, num_kv_tokens: int, num_heads: int
) -> torch.Tensor:
    """One zero, int32 [1], on the device of ``cu_seq_len_k_start``: FlashLatte splits the work in each call.

    Raises:
        TypeError: ``cu_seq_len_k_start`` is not a tensor.
    """
    device = checks.given("cu_seq_len_k_start", cu_seq_len_k_start).device
    return torch.zeros(1, dtype=torch.int32, device=device)


def get_num_sms() -> int:
    """The number that ``set_num_sms`` set, or else the number of SMs of the current GPU (without a GPU, 4)."""
    return _num_sms or _device_sms()


def set_num_sms(num_sms: int) -> None:
    """Set the result of ``get_num_sms``; 0 resets it. FlashLatte's kernels use the whole GPU in any case.

    Raises:
        TypeError, ValueError: ``num_sms`` is not an int from 0 to the number of SMs of the current GPU.
    """
    global _num_sms
    number = checks.positive_int("num_sms", num_sms, or_zero=True)
    if number > _device_sms():
        raise ValueError(f"num_sms must be at most the GPU's {_device_sms()}, got {number}")
    _num_sms = number


def _device_sms() -> int:
    has_gpu = torch.cuda.is_available()
    return machine.num_sms(torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu"))


def _aligned_rows(rows: Sequence[int], width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """An output with rows aligned to 128 bytes, as top-k kernels require; None if the width is aligned already."""
    align = 128 // dtype.itemsize
    if width % align == 0:
        return None
    return torch.empty(math.prod(rows), -(-width // align) * align, dtype=dtype, device=device)[:, :width]


def _check_schedule(schedule_meta: object) -> None:
    if schedule_meta is not None and not isinstance(schedule_meta, torch.Tensor):
        raise TypeError(f"schedule_meta must be a tensor or None, got {type(schedule_meta).__name__}")
