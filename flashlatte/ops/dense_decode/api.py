"""``dense_decode``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import math

import torch

from flashlatte.kv_cache import scales
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import format_class, formats_of_width, names_of, plain_format
from flashlatte.ops.dense_decode.reference import DenseDecodeParams
from flashlatte.runtime import checks, decode_outputs, dispatch, gradients, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "dense_decode"
# A whole row is one tile in shared memory.
_PORTABLE_MAX_HEAD_DIM = 1024
# TMA loads pages in boxes of 64 keys or less; the period of the shared-memory swizzle is 8 keys.
_HOPPER_PAGE_SIZE = 8
# Alignment of rows for TMA, in bytes.
_HOPPER_ALIGNMENT = 16
# Accepted values of ``precision``.
_PRECISIONS = (None, "fp8")


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    if reason := refusals.dtype(call, torch.bfloat16, torch.float16) or refusals.hopper(call):
        return reason
    if call.cache_format is not None and not _hopper_reads(format_class(call.cache_format)):
        return f"takes caches in {names_of(_hopper_reads)}, not {call.cache_format}"
    return (
        refusals.page_size(call, _HOPPER_PAGE_SIZE)
        or refusals.head_dims(call, (576, 512), (512, 512))
        or refusals.unaligned(call, _HOPPER_ALIGNMENT)
    )


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    if call.optional_features:
        return f"has no {call.optional_features}: it multiplies in q's dtype"
    return refusals.triton_attention(call, _PORTABLE_MAX_HEAD_DIM)


def _hopper_reads(layout: type[CacheFormat]) -> bool:
    return layout.plain and layout.record_dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@repeats_launches
def dense_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    head_dim_v: int = 512,
    softmax_scale: float | None = None,
    causal: bool = False,
    k_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = -math.inf,
    batch_invariant: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few query tokens per request over all tokens of its paged latent cache.

    A key is a cache row, a value is its first ``head_dim_v`` elements: out = softmax(q · Kᵀ · softmax_scale) · V. This
    is the absorbed form of MLA (DeepSeek-V2, arXiv:2405.04434, §2.1). It has no backward pass, and warns once if
    gradients are enabled and q or k_cache requires one.

    Args:
        q: [b, s_q, h_q, d], bf16, fp16, or float32 (reference only). d is 576 or 512 in MLA; the reference takes any. b
            and s_q may be 0. Or the first columns of the queries, if the others are in ``q_rope``.
        k_cache: [pages, page_size, h_kv, d], h_kv dividing h_q; q's dtype, or float8_e4m3fn.
        block_table: int32 or int64 [b, max_pages], the pages of each request in order. Entries beyond a request's
            length are not read.
        cache_seqlens: int32 or int64 [b], keys of each request; clamped to 0 and to the capacity of block_table. Keys
            whose page is not in the cache are masked.
        q_rope: the last columns of the queries, [b, s_q, h_q, d - width of q], in q's dtype, last stride 1; None: ``q``
            has all d. The result is that of ``torch.cat((q, q_rope), -1)``. "hopper" reads 512 and 64 columns in place
            if rows begin at multiples of 16 bytes; the others, and other widths, copy both parts.
        head_dim_v: width of a value, at most d.
        softmax_scale: above 0; d^-0.5 if None.
        causal: query token j attends to keys 0 to n - s_q + j, where n is the clamped cache_seqlens (bottom-right
            alignment).
        k_scale: float8_e4m3fn cache only: key = byte · k_scale; above 0, a number or a one-element float32 tensor on
            the device of q; default 1.
        out: [b, s_q, h_q, head_dim_v] in q's dtype to write to; last stride 1. It must not share memory with an input.
        lse: float32 [b, h_q, s_q] to write to, any strides.
        empty_lse: lse of a query that has no visible key, inf or -inf; its out is 0.
        batch_invariant: make a request's result bitwise independent of the other requests of the batch.
        precision: None multiplies in q's dtype, to which e4m3 keys are converted exactly. "fp8" (float8_e4m3fn cache
            only) multiplies in e4m3: each row of q is rounded to e4m3 with its own scale, and the probabilities are
            rounded too. The error is about 15 times that of None if the weights of a query are similar, and 25 times if
            few keys dominate. Hopper's e4m3 sums have 14 bits: if the values have a common sign, the error is 6% with
            4,096 keys and a third with 32,768 (docs/guide/numerics.md). Only "hopper" and "reference" implement it; on
            a GPU, the reference runs only if ``backend`` names it.
        backend: "hopper", "portable" or "reference"; None selects one; a named backend that cannot run the call is an
            error.

    Returns:
        out [b, s_q, h_q, head_dim_v] in q's dtype, and lse (natural logarithm), float32 [b, h_q, s_q]. A newly
        allocated lse has strides (s_q · h_q, 1, h_q).

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments; a
            backend that cannot run the call.
    """
    checks.tensor("q", q, ("b", "s_q", "h_q", "d"), checks.FLOAT_DTYPES, may_be_empty=2)
    batch, s_q, h_q, _ = q.shape
    head_dim = checks.query_width(q, q_rope)
    device = q.device
    _check_format(k_cache, head_dim)
    checks.same_dtype("k_cache", k_cache, q, torch.float8_e4m3fn)
    checks.tensor("k_cache", k_cache, ("pages", "page_size", "h_kv", head_dim), (q.dtype, torch.float8_e4m3fn), device)
    h_kv = k_cache.shape[2]
    if h_q % h_kv:
        raise ValueError(f"k_cache must have a number of heads that divides q's {h_q}, got {h_kv}")
    checks.block_table(block_table, batch, device)
    checks.indices("cache_seqlens", cache_seqlens, (batch,), device)
    value_checks.pages(block_table, cache_seqlens, *k_cache.shape[:2])
    if checks.positive_int("head_dim_v", head_dim_v) > head_dim:
        raise ValueError(f"head_dim_v must be at most q's last dimension {head_dim}, got {head_dim_v}")
    scale = checks.softmax_scale(softmax_scale, head_dim)
    checks.flag("causal", causal)
    checks.flag("batch_invariant", batch_invariant)
    if k_scale is not None and k_cache.dtype != torch.float8_e4m3fn:
        raise ValueError(
            "k_scale must be None unless k_cache is float8_e4m3fn, "
            f"got k_cache in {checks.dtype_names([k_cache.dtype])}"
        )
    if precision not in _PRECISIONS:
        raise ValueError(f"precision must be None or 'fp8', got {precision!r}")
    if precision is not None and k_cache.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"precision must be None unless k_cache is float8_e4m3fn, got {precision!r} and k_cache in "
            f"{checks.dtype_names([k_cache.dtype])}"
        )
    k_scale_tensor, k_scale_value = scales.split("k_scale", k_scale, device)
    out, lse = decode_outputs.prepare(q, head_dim_v, out, lse, q_rope=q_rope, k_cache=k_cache)

    call = dispatch.CallSpec(
        OPERATION,
        device,
        q.dtype,
        cache_format=plain_format(k_cache.dtype).name,
        page_size=k_cache.shape[1],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        h_q=h_q,
        h_kv=h_kv,
        rows_aligned=checks.rows_aligned(k_cache, _HOPPER_ALIGNMENT),
        optional_features=None if precision is None else f"precision={precision!r}",
    )
    gradients.warn_if_dropped(OPERATION, q, q_rope, k_cache)
    empty_lse = checks.empty_lse(empty_lse)
    select = dispatch.select if precision is None else dispatch.select_kernel
    backend = select(call, backend)
    if batch == 0 or s_q == 0:
        return out, lse
    params = DenseDecodeParams(
        q=q,
        q_rope=q_rope,
        k_cache=k_cache,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        k_scale_tensor=k_scale_tensor,
        k_scale_value=k_scale_value,
        softmax_scale=scale,
        causal=causal,
        empty_lse=empty_lse,
        batch_invariant=batch_invariant,
        precision=precision,
        out=out,
        lse=lse,
    )
    _dense_decode(params, backend)
    return out, lse


@register_op(OPERATION, mutates=("out", "lse"))
@dispatch.implemented(OPERATION, hopper=_refuses_hopper, portable=_refuses_portable)
def _dense_decode(params: DenseDecodeParams, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.dense_decode.hopper.launch import dense_decode
    elif backend == "portable":
        from flashlatte.ops.dense_decode.portable.launch import dense_decode
    else:
        from flashlatte.ops.dense_decode.reference import dense_decode

    dense_decode(params)


def _check_format(k_cache: object, head_dim: int) -> None:
    """Raise an error that names ``sparse_decode`` if the cache is in a format with scales."""
    if checks.is_strided(k_cache) and k_cache.dim() and k_cache.shape[-1] != head_dim:
        layouts = formats_of_width(k_cache)
        if layouts:
            raise ValueError(
                f"k_cache must have rows of q's {head_dim} elements, got a cache of format "
                f"{checks.join_or(layout.name for layout in layouts)}, which sparse_decode reads"
            )
