"""``paged_attention``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashlatte.kv_cache import scales
from flashlatte.ops.paged_attention.reference import PagedAttentionParams
from flashlatte.runtime import checks, dispatch, gradients, ragged, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "paged_attention"
QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_HALVES = (torch.bfloat16, torch.float16)
# A whole row is one tile in shared memory.
_PORTABLE_MAX_HEAD_DIM = 512
# Keys must fit shared memory, and values a consumer's registers.
_HOPPER_MAX_HEAD_DIM, _HOPPER_MAX_HEAD_DIM_V = 192, 128
# The smallest TMA box of keys; a page consists of whole boxes.
_HOPPER_PAGE_SIZE = 16
# With fewer query rows for one request, more than half of an H100's SMs would have no tile of 128 rows;
# the portable kernel splits keys.
HOPPER_MIN_ROWS = 8192
# Positions plus tile sizes must fit 32 bits.
_MAX_KEYS = 2**30


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    return (
        refusals.dtype(call, *_HALVES)
        or refusals.hopper(call)
        or refusals.page_size(call, _HOPPER_PAGE_SIZE)
        or _refuses_head_dims(call)
        or refusals.unaligned(call)
        or (call.optional_features and f"does not take {call.optional_features}")
        or _refuses_few_rows(call)
    )


def _refuses_head_dims(call: dispatch.CallSpec) -> str | None:
    head_dim, head_dim_v = call.head_dim or 0, call.head_dim_v or 0
    if head_dim <= _HOPPER_MAX_HEAD_DIM and head_dim_v <= _HOPPER_MAX_HEAD_DIM_V:
        return None
    return (
        f"takes head dims up to {_HOPPER_MAX_HEAD_DIM} with {_HOPPER_MAX_HEAD_DIM_V}, not {head_dim} with {head_dim_v}"
    )


def _refuses_few_rows(call: dispatch.CallSpec) -> str | None:
    if call.rows is None or call.rows >= HOPPER_MIN_ROWS:
        return None
    return (
        f"takes calls in which one request can have {HOPPER_MIN_ROWS} query rows (tokens times heads) and every other "
        f"request one token; here it can have {max(call.rows, 0)}"
    )


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton_attention(call, _PORTABLE_MAX_HEAD_DIM)


@repeats_launches
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: int | Sequence[int] | None = None,
    prefix_ranges: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    alibi_sqrt: bool = False,
    qq_bias: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_scale: float | torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = -math.inf,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries over the pages of their requests: decode, prefill, chunked prefill, or a mixed batch.

    Request i has queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1 and s_k keys: seqused_k[i] in its pages, followed,
    if ``k`` and ``v`` are given, by those of its own queries. Its query j has position p = j + s_k - s_q, so the last
    query is aligned with the last key. Query head h reads key head h // (h_q / h_kv). The score of a key n is

        softcap · tanh(q · K[n] · softmax_scale / softcap) - slope · |p - n| + qq_bias

    where only the terms that are given apply. It has no backward pass, and warns once if gradients are enabled and an
    input requires one.

    Args:
        q: [T, h_q, d], bf16, fp16, or float32 (reference only). T may be 0.
        k_cache: [pages, page_size, h_kv, d], any strides, so tokens and heads may be in either order in memory; h_kv
            divides h_q. Of q's dtype, float8_e4m3fn, float8_e5m2 or int8. Or [pages, page_size, h_kv, d / x, x]: the
            view ``permute(0, 3, 1, 2, 4)`` of vLLM's [pages, h_kv, d / x, page_size, x].
        v_cache: [pages, page_size, h_kv, d_v], any strides, in the dtype of k_cache.
        block_table: int32 or int64 [b, max_pages], the pages of each request in order, for at most 2^30 keys. Entries
            outside a request's length or window are not read.
        seqused_k: int32 or int64 [b], keys of each request in its pages; clamped to 0 and to the capacity of
            block_table before positions are computed. Keys whose page is not in the cache are masked.
        cu_seqlens_q: int32 or int64 [b + 1], non-decreasing boundaries of the requests. Tokens of no request have out 0
            and lse ``empty_lse``.
        k, v: [T, h_kv, d] and [T, h_kv, d_v] in q's dtype, last stride 1: keys and values of the queries' own tokens,
            which are not in the cache yet. Both or neither.
        softmax_scale: above 0; d^-0.5 if None.
        causal: a query attends to no key after its position.
        window: None; an int w ≥ 1: a query attends to its position and the w - 1 before it; or a pair (left, right): it
            attends to p - left to p + right, -1 for unbounded. ``causal`` limits right to 0. NaN in a key or value that
            is masked for all queries of a request does not propagate; NaN in a value that is visible to one query of
            the request may propagate to its other queries.
        prefix_ranges: int32 or int64 [b, r, 2], first and last position of ranges (such as images) within which every
            query attends to every key, regardless of ``causal`` and ``window``. A range whose last position is before
            its first is empty.
        softcap: above 0 and at most 2^125, or 0 for none.
        alibi_slopes: float32 [h_q].
        alibi_sqrt: use √|p - n| instead of |p - n|.
        qq_bias: float32 [n, n], added to the score of query i and the key of query j of a request, for i and j below n;
            -inf masks, as for a draft tree.
        attn_sink: float32 [h_q], the score of an additional key whose value is 0. lse does not include it.
        k_scale: scale of a quantized k_cache: key = element · k_scale. A number, or float32 with one element, [h_kv],
            or [pages, page_size, h_kv]; above 0; on q's device; default 1.
        v_scale: the same for v_cache.
        out: [T, h_q, d_v] to write to; last stride 1; in q's dtype, or float8_e4m3fn. It must not share memory with an
            input.
        out_scale: out is float8_e4m3fn: the result divided by out_scale, saturated. A number or a one-element float32
            tensor. Without it, an ``out`` in float8_e4m3fn has scale 1.
        lse: float32 [T, h_q] to write to, any strides.
        empty_lse: lse of a query that has no visible key, inf or -inf; its out is 0.
        backend: "hopper", "portable" or "reference"; None selects one; a named backend that cannot run the call is an
            error.

    Returns:
        out [T, h_q, d_v], and lse (natural logarithm), float32 [T, h_q]; a newly allocated one has strides (1, T).

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments;
            cu_seqlens_q on the CPU that decreases or exceeds T; a backend that cannot run the call.
    """
    checks.tensor("q", q, ("T", "h_q", "d"), checks.FLOAT_DTYPES, may_be_empty=1)
    k_cache = _check_k_cache(k_cache, q)
    checks.tensor("v_cache", v_cache, (*k_cache.shape[:3], "d_v"), (k_cache.dtype,), q.device, unit_last_stride=False)
    _check_requests(block_table, seqused_k, cu_seqlens_q, k_cache.shape[1], q)
    _check_new_keys(k, v, q, v_cache)
    if not 0 <= checks.number("softcap", softcap) < math.inf:
        raise ValueError(f"softcap must be a finite number of at least 0, got {softcap}")
    if softcap:
        checks.score_factor("softcap", softcap)
    window_left, window_right = ragged.window_sides(window, checks.flag("causal", causal))
    k_scale, k_scale_value = _cache_scale("k_scale", k_scale, k_cache)
    v_scale, v_scale_value = _cache_scale("v_scale", v_scale, v_cache)
    out, lse = _outputs(q, v_cache.shape[3], out, out_scale, lse)
    checks.no_overlap("out", out, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    out_scale, out_scale_value = scales.split("out_scale", out_scale, q.device)
    params = PagedAttentionParams(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        k=k,
        v=v,
        softmax_scale=checks.softmax_scale(softmax_scale, q.shape[2]),
        window_left=window_left,
        window_right=window_right,
        prefix_ranges=prefix_ranges,
        softcap=float(softcap),
        alibi_slopes=alibi_slopes,
        alibi_sqrt=alibi_sqrt,
        qq_bias=qq_bias,
        attn_sink=attn_sink,
        k_scale=k_scale,
        k_scale_value=k_scale_value,
        v_scale=v_scale,
        v_scale_value=v_scale_value,
        out_scale=out_scale,
        out_scale_value=out_scale_value,
        empty_lse=checks.empty_lse(empty_lse),
        out=out,
        lse=lse,
    )
    _check_score_terms(params)
    _check_pages(params)
    gradients.warn_if_dropped(OPERATION, q, k_cache, v_cache, k, v)
    backend = dispatch.select(_call_spec(params), backend)
    if q.shape[0]:
        _paged_attention(params, backend)
    return out, lse


@register_op(OPERATION, mutates=("out", "lse"))
@dispatch.implemented(OPERATION, hopper=_refuses_hopper, portable=_refuses_portable)
def _paged_attention(params: PagedAttentionParams, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.paged_attention.by_length import paged_attention
    elif backend == "portable":
        from flashlatte.ops.paged_attention.portable.launch import attend as paged_attention
    else:
        from flashlatte.ops.paged_attention.reference import paged_attention

    paged_attention(params)


def _call_spec(params: PagedAttentionParams) -> dispatch.CallSpec:
    """The properties of a call that implementations accept or refuse."""
    q, k_cache, v_cache = params.q, params.k_cache, params.v_cache
    tokens, h_q, head_dim = q.shape
    _, page_size, h_kv, head_dim_v = v_cache.shape
    return dispatch.CallSpec(
        OPERATION,
        q.device,
        q.dtype,
        page_size=page_size,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        h_q=h_q,
        h_kv=h_kv,
        # Maximum for one request; every other request has at least one token.
        rows=(tokens - params.cu_seqlens_q.shape[0] + 2) * h_q,
        optional_features=_optional_features(params),
        rows_aligned=all(map(checks.rows_aligned, (q, k_cache, v_cache))),
    )


def _optional_features(params: PagedAttentionParams) -> str | None:
    """The given features that some implementation lacks, in words, or None."""
    k_cache, dtype = params.k_cache, params.q.dtype
    present = {
        "a quantized cache": k_cache.dtype != dtype,
        "rows of a cache in pieces": k_cache.shape[3] > 1 or k_cache.stride(4) != 1 or params.v_cache.stride(3) != 1,
        "k and v in addition to the cache": params.k is not None,
        "prefix_ranges": params.prefix_ranges is not None,
        "softcap": params.softcap > 0,
        "alibi_slopes": params.alibi_slopes is not None,
        "qq_bias": params.qq_bias is not None,
        "out in float8_e4m3fn": params.out.dtype != dtype,
    }
    return ", ".join(words for words, is_present in present.items() if is_present) or None


def _check_k_cache(k_cache: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Check a cache with contiguous rows as the last axis, or with split rows as the last two."""
    head_dim = q.shape[2]
    dtypes = (q.dtype, *QUANTIZED)
    checks.same_dtype("k_cache", k_cache, q, *QUANTIZED)
    if checks.is_strided(k_cache) and k_cache.dim() == 5:
        x = max(k_cache.shape[4], 1)
        shape = ("pages", "page_size", "h_kv", head_dim // x, x if head_dim % x == 0 else head_dim)
        checks.tensor("k_cache", k_cache, shape, dtypes, q.device, unit_last_stride=False)
    else:
        shape = ("pages", "page_size", "h_kv", head_dim)
        checks.tensor("k_cache", k_cache, shape, dtypes, q.device, unit_last_stride=False)
        k_cache = k_cache.unsqueeze(3)
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"k_cache must have a number of heads that divides q's {q.shape[1]}, got {k_cache.shape[2]}")
    return k_cache


def _check_requests(
    block_table: torch.Tensor, seqused_k: torch.Tensor, cu_seqlens_q: torch.Tensor, page_size: int, q: torch.Tensor
) -> None:
    tokens, device = q.shape[0], q.device
    checks.tensor("cu_seqlens_q", cu_seqlens_q, ("b + 1",), checks.INDEX_DTYPES, device)
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 1 and tokens:
        raise ValueError(
            f"cu_seqlens_q must have shape [b + 1] with b at least 1 for q's {tokens} tokens, "
            f"got {list(cu_seqlens_q.shape)}"
        )
    ragged.check_boundaries("cu_seqlens_q", cu_seqlens_q, tokens)
    # A request may have no pages if all of its keys are new.
    checks.tensor("block_table", block_table, (batch, "max_pages"), checks.INDEX_DTYPES, device, may_be_empty=2)
    if block_table.shape[1] * page_size > _MAX_KEYS:
        raise ValueError(
            f"block_table must have room for at most {_MAX_KEYS} keys of a request, got {block_table.shape[1]} pages "
            f"of {page_size}"
        )
    checks.indices("seqused_k", seqused_k, (batch,), device)


def _check_new_keys(k: torch.Tensor | None, v: torch.Tensor | None, q: torch.Tensor, v_cache: torch.Tensor) -> None:
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together, got {'no k' if k is None else 'no v'}")
    h_kv, head_dim_v = v_cache.shape[2:]
    for name, rows, width in (("k", k, q.shape[2]), ("v", v, head_dim_v)):
        if rows is not None:
            checks.tensor(name, rows, (q.shape[0], h_kv, width), (q.dtype,), q.device)


def _check_score_terms(params: PagedAttentionParams) -> None:
    h_q, device, float32 = params.q.shape[1], params.q.device, (torch.float32,)
    ranges, bias = params.prefix_ranges, params.qq_bias
    if ranges is not None:
        batch = params.cu_seqlens_q.shape[0] - 1
        checks.tensor("prefix_ranges", ranges, (batch, "r", 2), checks.INDEX_DTYPES, device, may_be_empty=2)
    for name, per_head in (("alibi_slopes", params.alibi_slopes), ("attn_sink", params.attn_sink)):
        if per_head is not None:
            checks.tensor(name, per_head, (h_q,), float32, device, unit_last_stride=False)
    if checks.flag("alibi_sqrt", params.alibi_sqrt) and params.alibi_slopes is None:
        raise ValueError("alibi_sqrt must be False if alibi_slopes is None")
    if bias is not None:
        checks.tensor("qq_bias", bias, ("n", "n"), float32, device)
        if bias.shape[0] != bias.shape[1]:
            raise ValueError(f"qq_bias must have shape [n, n], got {list(bias.shape)}")


def _check_pages(params: PagedAttentionParams) -> None:
    """Check the entries of block_table that the queries read, if FLASHLATTE_CHECK is 1."""
    if value_checks.ENABLED:
        new = 0 if params.k is not None else params.cu_seqlens_q.diff()
        # Pages before the window may have been reused.
        starts = (params.seqused_k.long() - new - params.window_left).clamp_min(0)
        num_pages, page_size = params.k_cache.shape[:2]
        lengths = params.seqused_k
        value_checks.pages(params.block_table, lengths, num_pages, page_size, name="seqused_k", starts=starts)


def _cache_scale(
    name: str, scale: float | torch.Tensor | None, cache: torch.Tensor
) -> tuple[torch.Tensor | None, float]:
    """The scale as (tensor per token and head, 1.0), or as (None, number)."""
    if scale is not None and cache.dtype not in QUANTIZED:
        accepted = checks.dtype_names(QUANTIZED)
        raise ValueError(
            f"{name} belongs to a cache in {accepted}, and this one is {checks.dtype_names([cache.dtype])}"
        )
    if checks.is_strided(scale) and scale.numel() != 1:
        shape = cache.shape[:3]
        if scale.shape != shape and scale.shape != shape[2:]:
            raise ValueError(
                f"{name} must have one element or shape [{shape[2]}] or {list(shape)}, got {list(scale.shape)}"
            )
        checks.tensor(name, scale, tuple(scale.shape), (torch.float32,), cache.device, unit_last_stride=False)
        return scale.expand(shape), 1.0
    tensor, value = scales.split(name, scale, cache.device)
    return (None if tensor is None else tensor.expand(cache.shape[:3])), value


def _outputs(
    q: torch.Tensor,
    head_dim_v: int,
    out: torch.Tensor | None,
    out_scale: float | torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (q.shape[0], q.shape[1], head_dim_v)
    fp8 = torch.float8_e4m3fn
    if out is None:
        out = torch.empty(shape, dtype=q.dtype if out_scale is None else fp8, device=q.device)
    else:
        checks.output("out", out, shape, (fp8,) if out_scale is not None else (q.dtype, fp8), q.device)
    if lse is None:
        lse = torch.empty(shape[1::-1], dtype=torch.float32, device=q.device).T
    else:
        checks.output("lse", lse, shape[:2], (torch.float32,), q.device, unit_last_stride=False)
    return out, lse
