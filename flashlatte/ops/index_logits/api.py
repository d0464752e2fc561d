"""``index_logits`` and ``paged_index_logits``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import fp4
from flashlatte.kv_cache.index_formats import (
    FORMAT_BY_KEY_DTYPE,
    INDEX_FORMATS,
    IndexFormat,
    as_index_cache,
    check_head_dim,
)
from flashlatte.ops.index_logits.reference import IndexLogitsParams, PagedIndexLogitsParams
from flashlatte.runtime import checks, dispatch, gradients, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

RAGGED, PAGED = "index_logits", "paged_index_logits"
QUERY_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
LOGIT_DTYPES = (torch.float32, torch.bfloat16)
MAX_HEADS = 128
_MIN_HOPPER_HEADS = 8

# Alignment of the rows that TMA copies, in bytes, and divisor of the page size.
_HOPPER_ALIGNMENT, _HOPPER_PAGES = 16, 32


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    if reason := refusals.dtype(call, torch.float8_e4m3fn) or refusals.hopper(call):
        return reason
    if call.cache_format is not None and INDEX_FORMATS[call.cache_format].encoding != "e4m3":
        return f"takes keys in e4m3, not {call.cache_format}"
    heads = call.h_q or _MIN_HOPPER_HEADS
    if heads < _MIN_HOPPER_HEADS or heads & (heads - 1):
        return f"takes 8, 16, 32, 64 or 128 heads, not {heads}"
    return refusals.page_size(call, _HOPPER_PAGES) or refusals.unaligned(call, _HOPPER_ALIGNMENT)


@repeats_launches
def index_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    clean: bool = True,
    max_keys: int | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores of index queries against contiguous index keys, each query against its own range of keys.

    logits[i, j] = k_scale[j] · Σ_h weights[i, h] · relu(q[i, h] · k[j]) for key_start[i] ≤ j < key_end[i]
    (DeepSeek-V3.2's lightning indexer, arXiv:2512.02556, §2.1). It has no backward pass, and warns once if gradients
    are enabled and an input requires one.

    Args:
        q: [M, H, head_dim], float8_e4m3fn, bf16 or float32; H from 1 to 128, head_dim 32, 64 or 128. The scales of a
            float8_e4m3fn q are folded into ``weights`` (``index_query``). M and N may be 0.
        k: [N, head_dim], float8_e4m3fn or bf16; float32 if q is; or mxfp4: uint8 [N, head_dim / 2].
        weights: float32 [M, H].
        key_start, key_end: int32 or int64 [M]. Clamped to 0 … N; the range is empty unless the end is greater than the
            start.
        k_scale: float32 [N], above 0, for a float8_e4m3fn k; E8M0 bytes, uint8 [N, head_dim / 32], for mxfp4.
        clean: write -inf where a query has no key. If False, these elements are undefined, or unchanged in ``out``.
        max_keys: None: a column for each key. An int, for compressed rows: column c is key max(key_start[i], 0) + c;
            keys from column ``max_keys`` on are dropped.
        dtype: dtype of the logits, float32 or bf16, if ``out`` is None.
        out: [M, N] or [M, max_keys], float32 or bf16 with last stride 1, to write to.
        backend: "hopper", "portable" or "reference"; None selects one.

    Returns:
        logits [M, N], or [M, max_keys].

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.tensor("q", q, ("M", "H", "head_dim"), QUERY_DTYPES, may_be_empty=1)
    num_rows, heads, head_dim = q.shape
    device = q.device
    check_heads(heads, head_dim)
    num_keys = check_keys(q, k, k_scale)
    checks.tensor("weights", weights, (num_rows, heads), (torch.float32,), device)
    for name, value in (("key_start", key_start), ("key_end", key_end)):
        checks.indices(name, value, (num_rows,), device)
    checks.flag("clean", clean)
    width = num_keys if max_keys is None else checks.positive_int("max_keys", max_keys)
    out = output(out, num_rows, width, dtype, device)
    gradients.warn_if_dropped(RAGGED, q, k, k_scale, weights)
    aligned = _aligned(k) and _aligned_operands(q, weights)
    if k_scale is not None:
        aligned = aligned and _aligned(k_scale) and (num_keys == 1 or k_scale.stride(0) == 1)
    call = dispatch.CallSpec(
        RAGGED, device, q.dtype, FORMAT_BY_KEY_DTYPE.get(k.dtype), head_dim=head_dim, h_q=heads, rows_aligned=aligned
    )
    backend = dispatch.select(call, backend)
    if num_rows and num_keys == 0:
        return out.fill_(-torch.inf) if clean else out
    if num_rows:
        compressed = max_keys is not None
        params = IndexLogitsParams(q, k, k_scale, weights, key_start, key_end, out, clean, compressed)
        _index_logits(params, backend)
    return out


@register_op(RAGGED, mutates=("logits",))
@dispatch.implemented(RAGGED, hopper=_refuses_hopper, portable=refusals.triton)
def _index_logits(params: IndexLogitsParams, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.index_logits.hopper.launch import ragged
    elif backend == "portable":
        from flashlatte.ops.index_logits.portable.ragged import ragged
    else:
        from flashlatte.ops.index_logits.reference import ragged

    ragged(params)


@repeats_launches
def paged_index_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_keys: int | None = None,
    clean: bool = True,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``index_logits`` over a paged cache of index keys, for the last tokens of each request.

    The device splits the work by the lengths, so no schedule needs to be computed beforehand.

    Args:
        q: [b, next_n, H, head_dim], float8_e4m3fn or bf16, and float32 over ``index_fp32``; H from 1 to 128,
            head_dim 32, 64 or 128.
        cache: [pages, page_size, 1, width] (or without the 1), as ``index_quantize`` wrote it; any page size.
        weights: float32 [b · next_n, H].
        cache_seqlens: int32 or int64 [b]: token t of a request is scored against keys 0 to cache_seqlens - next_n + t;
            or [b, next_n]: the number of keys of each token. Keys beyond the table do not exist. Unlike in decode
            operations, a length beyond the table is not clamped before next_n - t is subtracted.
        block_table: int32 or int64 [b, max_pages]. A key whose page is not in the cache is all zeros.
        max_keys: columns of the result; max_pages · page_size if None. Further keys are dropped.
        clean, dtype, out, backend: as for ``index_logits``; ``out`` is [b · next_n, max_keys].

    Returns:
        logits [b · next_n, max_keys].

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    cache, layout = check_paged(q, cache, weights, cache_seqlens, block_table)
    batch, next_n, heads, head_dim = q.shape
    device = q.device
    if value_checks.ENABLED and batch:
        longest = cache_seqlens if cache_seqlens.dim() == 1 else cache_seqlens.amax(dim=1)
        value_checks.pages(block_table, longest, *cache.shape[:2])
    checks.flag("clean", clean)
    width = block_table.shape[1] * cache.shape[1] if max_keys is None else checks.positive_int("max_keys", max_keys)
    out = output(out, batch * next_n, width, dtype, device)
    gradients.warn_if_dropped(PAGED, q, weights)
    # Only the pages of a cache may have gaps between them.
    aligned = _aligned(cache[:, 0, 0]) and _aligned_operands(q, weights)
    call = dispatch.CallSpec(
        PAGED, device, q.dtype, layout.name, cache.shape[1], head_dim, h_q=heads, rows_aligned=aligned
    )
    backend = dispatch.select(call, backend)
    if batch:
        params = PagedIndexLogitsParams(q, cache, weights, cache_seqlens, block_table, out, clean)
        _paged_index_logits(params, backend)
    return out


@register_op(PAGED, mutates=("logits",))
@dispatch.implemented(PAGED, hopper=_refuses_hopper, portable=refusals.triton)
def _paged_index_logits(params: PagedIndexLogitsParams, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.index_logits.hopper.launch import paged
    elif backend == "portable":
        from flashlatte.ops.index_logits.portable.paged import paged
    else:
        from flashlatte.ops.index_logits.reference import paged

    paged(params)


def check_paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[torch.Tensor, IndexFormat]:
    """Check the tensors of ``paged_index_logits``; returns the cache with four axes, and its format."""
    checks.tensor("q", q, ("b", "next_n", "H", "head_dim"), QUERY_DTYPES, may_be_empty=1)
    batch, next_n, heads, head_dim = q.shape
    check_heads(heads, head_dim)
    cache, layout = check_cache("cache", cache, q)
    checks.tensor("weights", weights, (batch * next_n, heads), (torch.float32,), q.device)
    per_query = checks.is_strided(cache_seqlens) and cache_seqlens.dim() != 1
    lengths_shape = (batch, next_n) if per_query else (batch,)
    checks.indices("cache_seqlens", cache_seqlens, lengths_shape, q.device)
    checks.block_table(block_table, batch, q.device)
    return cache, layout


def check_heads(heads: int, head_dim: int) -> None:
    check_head_dim("q", head_dim)
    if heads > MAX_HEADS:
        raise ValueError(f"q must have 1 to {MAX_HEADS} heads, got {heads}")


def check_cache(name: str, cache: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, IndexFormat]:
    """The cache with four axes, and its format."""
    cache, layout = as_index_cache(cache, q.shape[-1], name, q.device)
    if (q.dtype == torch.float32) != (layout.encoding == "fp32"):
        got = f"{checks.dtype_names([q.dtype])} over {layout.name}"
        raise TypeError(f"q must be float32 if and only if the index keys are, got {got}")
    return cache, layout


def check_keys(q: torch.Tensor, k: object, k_scale: object) -> int:
    """The number of keys."""
    head_dim, device = q.shape[2], q.device
    if checks.is_strided(k) and k.dtype == torch.uint8:
        k = checks.tensor("k", k, ("N", head_dim // 2), (torch.uint8,), device, may_be_empty=1)
        checks.tensor("k_scale", k_scale, (k.shape[0], head_dim // fp4.TILE), (torch.uint8,), device)
    else:
        k = checks.tensor("k", k, ("N", head_dim), QUERY_DTYPES, device, may_be_empty=1)
    num_keys = k.shape[0]
    if (q.dtype == torch.float32) != (k.dtype == torch.float32):
        raise TypeError(f"k must be float32 if and only if q is, got {checks.dtype_names([k.dtype])}")
    if k.dtype == torch.float8_e4m3fn:
        checks.tensor("k_scale", k_scale, (num_keys,), (torch.float32,), device)
    elif k.dtype != torch.uint8 and k_scale is not None:
        raise ValueError(f"k_scale must be None for {checks.dtype_names([k.dtype])} keys")
    return num_keys


def _aligned_operands(q: torch.Tensor, weights: torch.Tensor) -> bool:
    # The launch copies weights that are not contiguous, and views q.
    return _aligned(q) and (_aligned(weights) or not weights.is_contiguous())


def _aligned(x: torch.Tensor) -> bool:
    return checks.rows_aligned(x, _HOPPER_ALIGNMENT)


def output(out: torch.Tensor | None, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if out is not None:
        return checks.output("out", out, (rows, width), LOGIT_DTYPES, device)
    checks.dtype("dtype", dtype, LOGIT_DTYPES)
    return torch.empty(rows, width, dtype=dtype, device=device)
