"""vLLM's unified attention: batches of decode and prefill requests over pages of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashlatte.integrations.vllm.ops.dtypes import as_e4m3, quant_mode, without_scales
from flashlatte.integrations.vllm.ops.first_rows import first_rows
from flashlatte.kv_cache import scales
from flashlatte.ops.paged_attention import paged_attention
from flashlatte.runtime import checks

_ACCEPTED = "window_size must be (left, right) without causal, right being left, 0 or -1: left applies to both sides"
_SCALED_BY_TOKEN = ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD")


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: Sequence[int],
    block_table: torch.Tensor,
    softcap: float,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None,
    softmax_segm_expsum: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    output_scale: float | torch.Tensor | None = None,
    qq_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mm_prefix_range: torch.Tensor | None = None,
    rswa_prefix_lens: torch.Tensor | None = None,
    rswa_window: int | None = None,
    use_alibi_sqrt: bool = False,
    kv_quant_mode: Any = None,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    chunk_lookback: int = -1,
    use_td: bool = False,
    mm_prefix_clamp_sliding_window: bool = False,
) -> None:
    """``flashlatte.paged_attention`` with vLLM's arguments.

    Args:
        q: [T, h_q, d], bf16 or fp16; or float8_e4m3fn, which is dequantized first.
        k, v: the caches [pages, page_size, h_kv, d] and [..., d_v], any strides; in q's dtype (for an fp8 q: out's
            dtype or bf16), fp8 or int8. With a scale for each token and head, rows may be 4 bytes wider, as in vLLM,
            where a row ends with its scale.
        out: [T, h_q, d_v], written; q's dtype, or float8_e4m3fn.
        cu_seqlens_q: int32 or int64 [b + 1].
        seqused_k: int32 or int64 [b], keys of each request in its pages, including those of its queries.
        softmax_scale: above 0.
        causal: bottom-right: the last query of a request is at its last key.
        window_size: (left, right), -1 for no bound. Without ``causal``, left applies to both sides, as in vLLM from
            0.32 on, and right must be left, 0 or -1. Different sides: use ``paged_attention``.
        block_table: int32 or int64 [b or more, max_pages].
        softcap: above 0 and at most 2^125, or 0 for none.
        q_descale: float32 scale of a float8_e4m3fn q; only the first element is used.
        k_descale, v_descale: float32 scales of an fp8 cache with one scale; only the first element is used.
        alibi_slopes: [h_q]; the bias decreases with the distance from the query on both sides.
        sinks: [h_q].
        output_scale: the result is divided by it.
        qq_bias: [n, n].
        mm_prefix_range: int32 or int64 [b, r, 2].
        kv_quant_mode: vLLM's KVQuantMode, or None; 4-bit modes are not supported.
        k_scale_cache, v_scale_cache: float32 [pages, page_size, h_kv], for modes with a scale for each token and head.
        max_seqlen_q, max_seqlen_k, seq_threshold_3D, num_par_softmax_segments, softmax_segm_output, softmax_segm_max,
            softmax_segm_expsum, use_td: unused.
        rswa_prefix_lens and rswa_window, chunk_lookback with a window, mm_prefix_clamp_sliding_window with a window and
            mm_prefix_range: not supported.

    Raises:
        TypeError, ValueError: as ``paged_attention``, and for arguments that are not supported.
    """
    for name, given in (("k", k), ("v", v), ("out", out)):
        checks.given(name, given)
    requests = checks.indices("seqused_k", seqused_k, ("b",), may_be_empty=1).shape[0]
    per_request = isinstance(causal, torch.Tensor)
    _refuse(per_request, "causal must be True or False: one value for each request is not supported")
    left, right = _sides(window_size, checks.flag("causal", causal))
    both = rswa_window is not None and rswa_prefix_lens is not None
    _refuse(both, "rswa_window or rswa_prefix_lens must be None: windows with a prefix are not supported")
    lookback = checks.integer("chunk_lookback", chunk_lookback)
    clamp = checks.flag("mm_prefix_clamp_sliding_window", mm_prefix_clamp_sliding_window)
    if left >= 0:  # vLLM ignores these two without a window.
        _refuse_with_window(lookback, clamp, mm_prefix_range)
    mode = quant_mode(kv_quant_mode)
    modes = ("NONE", "FP8_PER_TENSOR", *_SCALED_BY_TOKEN)
    _refuse(mode not in modes, f"kv_quant_mode must be {checks.join_or(modes)}, got {mode}")
    by_token = mode in _SCALED_BY_TOKEN
    if by_token:
        k_scale, v_scale, missing = k_scale_cache, v_scale_cache, k_scale_cache is None or v_scale_cache is None
        _refuse(missing, f"k_scale_cache and v_scale_cache must be given with {mode}, got None")
        k, v = without_scales(k, checks.given("q", q)), without_scales(v, out)
    else:
        k_scale = _of_cache("k_descale", k_descale, k, requests)
        v_scale = _of_cache("v_descale", v_descale, v, requests)
    names = {"k_cache": "k", "v_cache": "v", "window": "window_size", "prefix_ranges": "mm_prefix_range"}
    more = {"alibi_sqrt": "use_alibi_sqrt", "attn_sink": "sinks", "out_scale": "output_scale"}
    more |= {f"{x}_scale": f"{x}_scale_cache" if by_token else f"{x}_descale" for x in "kv"}
    with checks.naming(**names, **more):
        paged_attention(
            _dequantized(q, q_descale, out, requests),
            as_e4m3(k),
            as_e4m3(v),
            first_rows("block_table", block_table, "seqused_k", requests),
            seqused_k,
            cu_seqlens_q,
            softmax_scale=checks.score_factor("softmax_scale", softmax_scale),
            causal=causal,
            window=(left, right),
            prefix_ranges=mm_prefix_range,
            softcap=softcap,
            alibi_slopes=_float32("alibi_slopes", alibi_slopes),
            alibi_sqrt=use_alibi_sqrt,
            qq_bias=_float32("qq_bias", qq_bias),
            attn_sink=_float32("sinks", sinks),
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            out_scale=output_scale,
        )


def unified_attention_diffkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: Sequence[int],
    block_table: torch.Tensor,
    softcap: float,
    max_seqlen_q: int = 1,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    use_alibi_sqrt: bool = False,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None,
    softmax_segm_expsum: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
) -> None:
    """``unified_attention`` with the arguments of vLLM's function for keys and values of different widths.

    Args:
        k, v: [pages, page_size, h_kv, d] and [..., d_v], such as the two parts of each row of one cache.
        max_seqlen_q, seq_threshold_3D, num_par_softmax_segments, softmax_segm_output, softmax_segm_max,
            softmax_segm_expsum: unused.
        Other arguments: as for ``unified_attention``.

    Raises:
        TypeError, ValueError: as ``unified_attention``.
    """
    unified_attention(
        q=q,
        k=k,
        v=v,
        out=out,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=seqused_k,
        max_seqlen_k=0,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        block_table=block_table,
        softcap=softcap,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        use_alibi_sqrt=use_alibi_sqrt,
    )


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ValueError(message)


def _refuse_with_window(chunk_lookback: int, clamp: bool, mm_prefix_range: torch.Tensor | None) -> None:
    message = f"chunk_lookback must be -1 with a window: chunks are not supported, got {chunk_lookback}"
    _refuse(chunk_lookback > -1, message)
    message = "mm_prefix_clamp_sliding_window must be False with a window and mm_prefix_range: it is not supported"
    _refuse(clamp and mm_prefix_range is not None, message)


def _sides(window_size: Sequence[int], causal: bool) -> tuple[int, int]:
    """Window bounds to the left and right of a query, -1 for none. Without ``causal``, vLLM uses only the left one."""
    checks.instance("window_size", window_size, Sequence)
    if len(window_size) != 2 or not all(map(checks.is_integer, window_size)):
        raise TypeError(f"window_size must be a pair of ints, got {window_size!r}")
    left, right = window_size
    if causal:
        return left, right
    _refuse(right not in (left, 0, -1), f"{_ACCEPTED}, got {window_size}")
    return left, left


def _dequantized(q: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor, requests: int) -> torch.Tensor:
    if not isinstance(q, torch.Tensor) or q.dtype != torch.float8_e4m3fn:
        return q
    dtype = out.dtype if out.dtype.itemsize == 2 else torch.bfloat16
    tensor, number = scales.split("q_descale", _first("q_descale", scale, requests), q.device)
    return (q.float() * (number if tensor is None else tensor)).to(dtype)


def _of_cache(name: str, scale: torch.Tensor | None, cache: torch.Tensor, requests: int) -> torch.Tensor | None:
    """The scale of a one-byte cache, else None: vLLM passes a scale with every cache."""
    return None if cache.dtype.itemsize > 1 else _first(name, scale, requests)


def _first(name: str, scale: torch.Tensor | None, requests: int) -> torch.Tensor | None:
    """The first element of vLLM's scale, an expanded [b, h_kv], which is empty if there are no requests."""
    if not isinstance(scale, torch.Tensor):
        return scale
    if checks.given(name, scale).numel():
        return scale[(0,) * scale.dim()]
    _refuse(requests > 0, f"{name} must have at least one element, got shape {list(scale.shape)}")
    return None


def _float32(name: str, x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else checks.given(name, x).float()
