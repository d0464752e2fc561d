"""Calls of the implementations of attention, with tensors of arbitrary contents."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from support.recording import Recorded, Recording

from flashlatte import kv_cache
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import format_class
from flashlatte.ops.dense_decode.reference import DenseDecodeParams
from flashlatte.ops.dense_prefill.reference import DensePrefillParams
from flashlatte.ops.paged_attention.reference import PagedAttentionParams
from flashlatte.ops.sparse_decode.reference import SparseDecodeParams
from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams
from flashlatte.testing.draws import in_two_parts

BF16 = torch.bfloat16
UNLIMITED = 2**31 - 1


def dense_decode(
    record: Callable[..., list[Recorded]],
    backend: str,
    batch: int = 4,
    s_q: int = 1,
    heads: int = 128,
    h_kv: int = 1,
    head_dim: int = 576,
    d_v: int = 512,
    pages: int = 8,
    page_size: int = 64,
    columns: int = 64,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int32,
    causal: bool = False,
    batch_invariant: bool = False,
    precision: str | None = None,
    q_pad: int = 0,
    separate_rope: bool = False,
    out_pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    q = torch.empty(batch, s_q, heads, head_dim + q_pad, dtype=dtype)[..., :head_dim]
    queries = in_two_parts(q, d_v) if separate_rope else {"q": q, "q_rope": None}
    return record(
        "dense_decode",
        backend,
        DenseDecodeParams(
            **queries,
            k_cache=torch.empty(pages, page_size, h_kv, head_dim, dtype=cache_dtype or dtype),
            block_table=torch.empty(batch, columns, dtype=index_dtype),
            cache_seqlens=torch.empty(batch, dtype=index_dtype),
            k_scale_tensor=None,
            k_scale_value=1.0,
            softmax_scale=head_dim**-0.5,
            causal=causal,
            empty_lse=-math.inf,
            batch_invariant=batch_invariant,
            precision=precision,
            out=torch.empty(batch, s_q, heads, d_v + out_pad, dtype=dtype)[..., :d_v],
            lse=torch.empty(batch, s_q, heads).transpose(1, 2),
        ),
        arch=arch,
    )


def paged_attention(
    record: Recording,
    backend: str,
    tokens: int = 64,
    requests: int = 2,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    d_v: int = 128,
    pages: int = 8,
    page_size: int = 16,
    columns: int = 64,
    hnd: bool = False,
    in_pieces: bool = False,
    new_keys: bool = False,
    terms: str = "",
    window: tuple[int, int] = (UNLIMITED, 0),
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    per_token: bool = False,
    out_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int32,
    q_pad: int = 0,
    out_pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    cache_dtype = cache_dtype or dtype
    piece = 16 // cache_dtype.itemsize if in_pieces else head_dim
    if in_pieces:
        k_cache = torch.empty(pages, kv_heads, head_dim // piece, page_size, piece, dtype=cache_dtype)
        k_cache, v_cache = (
            k_cache.permute(0, 3, 1, 2, 4),
            torch.empty(pages, kv_heads, d_v, page_size, dtype=cache_dtype),
        )
        v_cache = v_cache.permute(0, 3, 1, 2)
    else:
        axes = (kv_heads, page_size) if hnd else (page_size, kv_heads)
        k_cache, v_cache = (torch.empty(pages, *axes, width, dtype=cache_dtype) for width in (head_dim, d_v))
        if hnd:
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        k_cache = k_cache.unsqueeze(3)
    scale = torch.empty(pages, page_size, kv_heads) if per_token else None
    problem = PagedAttentionParams(
        q=torch.empty(tokens, heads, head_dim + q_pad, dtype=dtype)[..., :head_dim],
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=torch.empty(requests, columns, dtype=index_dtype),
        seqused_k=torch.empty(requests, dtype=index_dtype),
        cu_seqlens_q=torch.empty(requests + 1, dtype=index_dtype),
        k=torch.empty(tokens, kv_heads, head_dim, dtype=dtype) if new_keys else None,
        v=torch.empty(tokens, kv_heads, d_v, dtype=dtype) if new_keys else None,
        softmax_scale=head_dim**-0.5,
        window_left=window[0],
        window_right=window[1],
        prefix_ranges=torch.empty(requests, 4, 2, dtype=index_dtype) if "prefix" in terms else None,
        softcap=30.0 if "softcap" in terms else 0.0,
        alibi_slopes=torch.empty(heads) if "alibi" in terms else None,
        alibi_sqrt=False,
        qq_bias=torch.empty(16, 16) if "bias" in terms else None,
        attn_sink=torch.empty(heads) if "sink" in terms else None,
        k_scale=scale,
        k_scale_value=0.5,
        v_scale=scale,
        v_scale_value=0.5,
        out_scale=None,
        out_scale_value=0.5,
        empty_lse=-math.inf,
        out=torch.empty(tokens, heads, d_v + out_pad, dtype=out_dtype or dtype)[..., :d_v],
        lse=torch.empty(heads, tokens).T,
    )
    return record("paged_attention", backend, problem, arch=arch)


def queries(
    rows: tuple[int, ...], width: int, pad: int, dtype: torch.dtype, split: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries [*rows, width] and None, or their two parts as layers compute them: the latent part with the heads before
    the tokens, the rotated one behind columns that are not rotated."""
    if not split:
        return torch.empty(*rows, width + pad, dtype=dtype)[..., :width], None
    *tokens, heads = rows
    latent = torch.empty(heads, *tokens, width - 64 + pad, dtype=dtype)[..., : width - 64].movedim(0, -2)
    return latent, torch.empty(*rows, 128 + 64 + pad, dtype=dtype)[..., 128 : 128 + 64]


def sparse_decode(
    record: Callable[..., list[Recorded]],
    backend: str,
    form: str = "v32",
    batch: int = 3,
    s_q: int = 2,
    heads: int = 128,
    topk: int = 2048,
    head_dim: int = 576,
    d_v: int = 512,
    pages: int = 8,
    page_size: int = 64,
    page_gap: int = 0,
    extra_topk: int = 0,
    lengths: bool = False,
    sink: bool = True,
    dtype: torch.dtype = BF16,
    index_dtype: torch.dtype = torch.int32,
    q_pad: int = 0,
    split_q: bool = False,
    out_pad: int = 0,
    batch_invariant: bool = False,
    arch: int | None = 90,
) -> list[Recorded]:
    layout = row_format(form, head_dim)
    width = layout.record_width
    stride = page_size * width + page_gap
    storage = torch.empty(pages * stride, dtype=layout.record_dtype)
    cache = storage.as_strided((pages, page_size, 1, width), (stride, width, width, 1))
    length = torch.empty(batch, dtype=index_dtype) if lengths else None
    q, q_rope = queries((batch, s_q, heads), layout.head_dim, q_pad, dtype, split_q)
    return record(
        "sparse_decode",
        backend,
        SparseDecodeParams(
            q=q,
            k_cache=cache,
            indices=torch.empty(batch, s_q, topk, dtype=index_dtype),
            cache_format=layout.name,
            topk_length=length,
            attn_sink=torch.empty(heads) if sink else None,
            extra_k_cache=cache if extra_topk else None,
            extra_indices=torch.empty(batch, s_q, extra_topk, dtype=index_dtype) if extra_topk else None,
            extra_topk_length=length if extra_topk else None,
            softmax_scale=layout.head_dim**-0.5,
            empty_lse=-math.inf,
            batch_invariant=batch_invariant,
            out=torch.empty(batch, s_q, heads, d_v + out_pad, dtype=dtype)[..., :d_v],
            lse=torch.empty(batch, s_q, heads).transpose(1, 2),
            q_rope=q_rope,
        ),
        arch=arch,
    )


def sparse_prefill(
    record: Callable[..., list[Recorded]],
    backend: str,
    s_q: int = 8,
    heads: int = 128,
    head_dim: int = 576,
    d_v: int = 512,
    s_kv: int = 64,
    topk: int = 256,
    dtype: torch.dtype = BF16,
    index_dtype: torch.dtype = torch.int32,
    lengths: bool = False,
    sinks: bool = True,
    kv_pad: int = 0,
    q_pad: int = 0,
    split_q: bool = False,
    out_pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    q, q_rope = queries((s_q, heads), head_dim, q_pad, dtype, split_q)
    return record(
        "sparse_prefill",
        backend,
        SparsePrefillParams(
            q=q,
            kv=torch.empty(s_kv, 1, head_dim + kv_pad, dtype=dtype)[..., :head_dim],
            indices=torch.empty(s_q, 1, topk, dtype=index_dtype),
            topk_length=torch.empty(s_q, dtype=index_dtype) if lengths else None,
            attn_sink=torch.empty(heads) if sinks else None,
            softmax_scale=head_dim**-0.5,
            empty_lse=-math.inf,
            out=torch.empty(s_q, heads, d_v + out_pad, dtype=dtype)[..., :d_v],
            max_logits=torch.empty(s_q, heads),
            lse=torch.empty(s_q, heads),
            q_rope=q_rope,
        ),
        arch=arch,
    )


def dense_prefill(
    record: Recording,
    backend: str,
    tokens: int = 512,
    requests: int = 2,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 192,
    d_v: int = 128,
    window: tuple[int, int] = (UNLIMITED, 0),
    dtype: torch.dtype = BF16,
    index_dtype: torch.dtype = torch.int32,
    q_pad: int = 0,
    out_pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    starts = torch.zeros(requests + 1, dtype=index_dtype)
    return record(
        "dense_prefill",
        backend,
        DensePrefillParams(
            q=torch.empty(tokens, heads, head_dim + q_pad, dtype=dtype)[..., :head_dim],
            k=torch.empty(tokens + 1, kv_heads, head_dim, dtype=dtype),
            v=torch.empty(tokens + 1, kv_heads, d_v, dtype=dtype),
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_k=tokens,
            softmax_scale=head_dim**-0.5,
            window_left=window[0],
            window_right=window[1],
            empty_lse=-math.inf,
        ),
        torch.empty(tokens, heads, d_v + out_pad, dtype=dtype)[..., :d_v],
        torch.empty(heads, tokens).t(),
        arch=arch,
    )


def row_format(form: str, head_dim: int) -> CacheFormat:
    """The format of this name, with rows of this width if its width is variable."""
    return kv_cache.get_format(form, head_dim if format_class(form).plain else None)
