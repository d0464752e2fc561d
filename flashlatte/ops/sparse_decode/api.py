"""``sparse_decode``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flashlatte.kv_cache.codec import as_cache
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format, format_class, names_of
from flashlatte.ops.sparse_decode.reference import SparseDecodeParams
from flashlatte.runtime import checks, decode_outputs, dispatch, gradients, query_parts, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.strides import strides_in_use
from flashlatte.runtime.torch_op import register_op

OPERATION = "sparse_decode"
# A whole row is one tile in shared memory.
_PORTABLE_MAX_HEAD_DIM = 1024


# Formats with a scale per tile: (latent values per scale, scales per token).
_TILES = ((128, 4), (64, 7))
# Formats with a scale per block and no other values: (values per scale, scales per token, bytes per token).
_BLOCKS = ((32, 16, 528), (16, 32, 288))


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    if reason := refusals.dtype(call, torch.bfloat16) or refusals.hopper(call):
        return reason
    if reason := _refuses_format(call, _hopper_reads):
        return reason
    if call.extra_cache_format not in (None, call.cache_format):
        return f"takes a second cache in the first one's format {call.cache_format}, not {call.extra_cache_format}"
    alignment = (
        CacheFormat.row_alignment if call.cache_format is None else format_class(call.cache_format).row_alignment
    )
    return (
        refusals.head_dims(call, (576, 512), (512, 512))
        or refusals.unaligned(call, alignment)
        or refusals.cache_size(call)
    )


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    if reason := refusals.dtype(call, torch.bfloat16, torch.float16) or refusals.triton(call):
        return reason
    if reason := _refuses_format(call, _portable_reads) or refusals.head_dim_above(call, _PORTABLE_MAX_HEAD_DIM):
        return reason
    layout = None if call.cache_format is None else as_format(call.cache_format)
    if layout is not None and not layout.plain and (call.head_dim_v or 0) > layout.value_dim:
        return f"takes {layout.name}'s {layout.value_dim} latent elements as values, not {call.head_dim_v}"
    return None


def _refuses_format(call: dispatch.CallSpec, reads: Callable[[type[CacheFormat]], bool]) -> str | None:
    if call.cache_format is None or reads(format_class(call.cache_format)):
        return None
    return f"takes caches in {names_of(reads)}, not {call.cache_format}"


def _is_unpacked(layout: type[CacheFormat]) -> bool:
    return layout.tiling is not None and (layout.tiling.tile, layout.tiling.tiles) in _TILES


def _has_blocks(layout: type[CacheFormat]) -> bool:
    scaling = layout.block_scaling
    return scaling is not None and (scaling.block, scaling.blocks, scaling.token_bytes) in _BLOCKS


def _hopper_reads(layout: type[CacheFormat]) -> bool:
    return _is_unpacked(layout) or _has_blocks(layout) or (layout.plain and layout.record_dtype == torch.bfloat16)


def _portable_reads(layout: type[CacheFormat]) -> bool:
    return _is_unpacked(layout) or _has_blocks(layout) or (layout.plain and not layout.takes_scale)


def _reference_reads(layout: type[CacheFormat]) -> bool:
    return not layout.takes_scale


@repeats_launches
def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    cache_format: str | CacheFormat | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    head_dim_v: int = 512,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = -math.inf,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few query tokens per request over the cache tokens that are selected for each query token.

    A key is a dequantized cache row, a value its first ``head_dim_v`` elements. There is no causal mask: the indices
    determine the visible keys. A second cache with its own indices (DeepSeek-V4's compressed tokens, next to its
    window) is part of the same softmax. It has no backward pass, and warns once if gradients are enabled and an input
    requires one.

    The reference computes with float32 keys. Kernels round the keys of a format with scales to bf16, also for fp16
    queries. This is exact if scales are powers of two; else the error of a score, and of the lse, is at most 2^-9 ·
    softmax_scale · Σ |q_i · k_i|. fp16 queries need keys below 65,504.

    Args:
        q: [b, s_q, h_q, d], bf16, fp16, or float32 (reference only). d is the format's: 576 for ``v32``, 512 for
            ``model1``, ``v41`` and ``v41_fp4``, the row width for the others. b and s_q may be 0. Or the
            first columns of the queries, if the others are in ``q_rope``.
        k_cache: [pages, page_size, 1, width] of any page size, in format ``v32``, ``model1``, ``v41``, ``v41_fp4``,
            ``bf16``, ``fp16`` or ``fp32``; on the reference also ``nvfp4_ds_mla``.
        indices: int32 or int64 [b, s_q, topk], topk ≥ 1: page · page_size + offset. A value outside the cache, such as
            -1, selects nothing; a token that is selected twice is attended to twice.
        q_rope: the last columns of the queries, [b, s_q, h_q, d - width of q], in q's dtype, last stride 1; None: ``q``
            has all d. The result is that of ``torch.cat((q, q_rope), -1)``. "hopper" reads 512 and 64 columns in place
            if rows begin at multiples of 16 bytes, "portable" as many columns of q as a value has. Other widths are
            copied together first.
        cache_format: format of k_cache; None infers it.
        topk_length: int32 or int64 [b] or [b, s_q]: only the first topk_length indices are used; all if None.
        attn_sink: float32 [h_q]: out is scaled by e^lse / (e^lse + e^sink). lse does not include it. -inf has no
            effect; +inf makes out 0.
        extra_k_cache: a second cache in the same format, or in ``v41_fp4`` if k_cache is ``v41``; its page size may
            differ.
        extra_indices, extra_topk_length: as ``indices`` and ``topk_length``, for the second cache.
        softmax_scale: above 0; d^-0.5 if None.
        head_dim_v: width of a value, at most d.
        out: [b, s_q, h_q, head_dim_v] in q's dtype to write to; last stride 1. It must not share memory with an input.
        lse: float32 [b, h_q, s_q] to write to, any strides.
        empty_lse: lse of a query that selects nothing, inf or -inf; its out is 0, also with a sink.
        batch_invariant: make a query token's result bitwise independent of the rest of the batch: its keys are not
            split, which is slower for few query tokens.
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
    k_cache, layout = as_cache(k_cache, cache_format, "k_cache")
    if layout.takes_scale:
        raise ValueError(f"k_cache must be in {names_of(_reference_reads)} for sparse_decode, got {layout.name}")
    _check_cache("k_cache", k_cache, layout, q, q_rope)
    _check_selection("indices", indices, "topk_length", topk_length, q, k_cache)
    extra_k_cache, extra_format = _extra_cache(extra_k_cache, extra_indices, extra_topk_length, layout, q, q_rope)
    if attn_sink is not None:
        checks.tensor("attn_sink", attn_sink, (h_q,), (torch.float32,), q.device, unit_last_stride=False)
    if checks.positive_int("head_dim_v", head_dim_v) > head_dim:
        raise ValueError(f"head_dim_v must be at most {query_parts.last_dimension(q, q_rope)}, got {head_dim_v}")
    checks.flag("batch_invariant", batch_invariant)
    scale = checks.softmax_scale(softmax_scale, head_dim)
    inputs = {"q_rope": q_rope, "k_cache": k_cache, "extra_k_cache": extra_k_cache}
    out, lse = decode_outputs.prepare(q, head_dim_v, out, lse, **inputs)

    caches = [cache for cache in (k_cache, extra_k_cache) if cache is not None]
    call = dispatch.CallSpec(
        OPERATION,
        q.device,
        q.dtype,
        cache_format=layout.name,
        extra_cache_format=extra_format,
        page_size=k_cache.shape[1],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        h_q=h_q,
        h_kv=1,
        rows_aligned=all(checks.rows_aligned(cache, layout.row_alignment) for cache in caches),
        slots=max(cache.shape[0] * cache.shape[1] for cache in caches),
        stride_bytes=max(stride * cache.element_size() for cache in caches for stride in strides_in_use(cache)),
    )
    gradients.warn_if_dropped(OPERATION, q, q_rope, k_cache, extra_k_cache, attn_sink)
    empty_lse = checks.empty_lse(empty_lse)
    backend = dispatch.select(call, backend)
    if batch == 0 or s_q == 0:
        return out, lse
    params = SparseDecodeParams(
        q=q,
        k_cache=k_cache,
        indices=indices,
        cache_format=layout.name,
        topk_length=topk_length,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices=extra_indices,
        extra_topk_length=extra_topk_length,
        softmax_scale=scale,
        empty_lse=empty_lse,
        batch_invariant=batch_invariant,
        out=out,
        lse=lse,
        q_rope=q_rope,
    )
    _sparse_decode(params, backend)
    return out, lse


@register_op(OPERATION, mutates=("out", "lse"))
@dispatch.implemented(OPERATION, hopper=_refuses_hopper, portable=_refuses_portable)
def _sparse_decode(params: SparseDecodeParams, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.sparse_decode.hopper.launch import sparse_decode
    elif backend == "portable":
        from flashlatte.ops.sparse_decode.portable.launch import sparse_decode
    else:
        from flashlatte.ops.sparse_decode.reference import sparse_decode

    sparse_decode(params)


def _check_cache(
    name: str, cache: torch.Tensor, layout: CacheFormat, q: torch.Tensor, q_rope: torch.Tensor | None
) -> None:
    if cache.device != q.device:
        raise ValueError(f"{name} must be on {q.device} like the other arguments, got {cache.device}")
    head_dim, owners = query_parts.width(q, q_rope), query_parts.owners(q_rope)
    if layout.head_dim != head_dim:
        raise ValueError(
            f"{name} of format {layout.name} must have rows of {owners} {head_dim} elements, got {layout.head_dim}"
        )
    if layout.plain:
        checks.same_dtype(name, cache, q)


def _extra_cache(
    cache: torch.Tensor | None,
    indices: torch.Tensor | None,
    length: torch.Tensor | None,
    layout: CacheFormat,
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
) -> tuple[torch.Tensor | None, str | None]:
    """The checked second cache and the name of its format. ``layout``: the format of the first."""
    if cache is None:
        for name, value in (("extra_indices", indices), ("extra_topk_length", length)):
            if value is not None:
                raise ValueError(f"{name} must be None if extra_k_cache is None, got a tensor")
        return None, None
    if indices is None:
        raise ValueError("extra_indices must be given if extra_k_cache is, got None")
    if checks.is_strided(cache) and cache.dim():
        layout = layout.second_format(cache.shape[-1])
    cache, _ = as_cache(cache, layout, "extra_k_cache")
    _check_cache("extra_k_cache", cache, layout, q, q_rope)
    _check_selection("extra_indices", indices, "extra_topk_length", length, q, cache)
    return cache, layout.name


def _check_selection(
    name: str,
    indices: torch.Tensor,
    length_name: str,
    length: torch.Tensor | None,
    q: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    batch, s_q = q.shape[:2]
    may_be_empty = 0 if batch and s_q else 3
    checks.tensor(name, indices, (batch, s_q, "topk"), checks.INDEX_DTYPES, q.device, may_be_empty=may_be_empty)
    num_slots = cache.shape[0] * cache.shape[1]
    if length is None:
        value_checks.entries(name, indices, num_slots)
        return
    if checks.is_strided(length) and length.dim() not in (1, 2):
        raise ValueError(f"{length_name} must have shape [{batch}] or [{batch}, {s_q}], got {list(length.shape)}")
    shape = (batch, s_q) if checks.is_strided(length) and length.dim() == 2 else (batch,)
    checks.indices(length_name, length, shape, q.device)
    value_checks.selections(name, indices, length_name, length, num_slots)
