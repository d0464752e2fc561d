"""Calls of the implementations, with tensors whose contents do not matter."""

from __future__ import annotations

import math
from typing import Any

import torch
from support.recording import Recorded, Recording

from flashlatte import kv_cache
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.ops.compress.problem import Problem as CompressProblem
from flashlatte.ops.paged_attention.problem import Problem

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
UNLIMITED = 2**31 - 1


def dense_decode(
    record: Recording,
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
    q_pad: int = 0,
    out_pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    return record(
        "dense_decode",
        backend,
        torch.empty(batch, s_q, heads, head_dim + q_pad, dtype=dtype)[..., :head_dim],
        torch.empty(pages, page_size, h_kv, head_dim, dtype=cache_dtype or dtype),
        torch.empty(batch, columns, dtype=index_dtype),
        torch.empty(batch, dtype=index_dtype),
        None,
        1.0,
        head_dim**-0.5,
        causal,
        -math.inf,
        batch_invariant,
        torch.empty(batch, s_q, heads, d_v + out_pad, dtype=dtype)[..., :d_v],
        torch.empty(batch, s_q, heads).transpose(1, 2),
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
    problem = Problem(
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


def sparse_decode(
    record: Recording,
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
    out_pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    layout = row_format(form, head_dim)
    width = layout.record_width
    stride = page_size * width + page_gap
    storage = torch.empty(pages * stride, dtype=layout.record_dtype)
    cache = storage.as_strided((pages, page_size, 1, width), (stride, width, width, 1))
    length = torch.empty(batch, dtype=index_dtype) if lengths else None
    return record(
        "sparse_decode",
        backend,
        torch.empty(batch, s_q, heads, layout.head_dim + q_pad, dtype=dtype)[..., : layout.head_dim],
        cache,
        torch.empty(batch, s_q, topk, dtype=index_dtype),
        layout,
        length,
        torch.empty(heads) if sink else None,
        cache if extra_topk else None,
        torch.empty(batch, s_q, extra_topk, dtype=index_dtype) if extra_topk else None,
        length if extra_topk else None,
        layout.head_dim**-0.5,
        -math.inf,
        torch.empty(batch, s_q, heads, d_v + out_pad, dtype=dtype)[..., :d_v],
        torch.empty(batch, s_q, heads).transpose(1, 2),
        arch=arch,
    )


def sparse_prefill(
    record: Recording,
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
    out_pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    return record(
        "sparse_prefill",
        backend,
        torch.empty(s_q, heads, head_dim, dtype=dtype),
        torch.empty(s_kv, 1, head_dim + kv_pad, dtype=dtype)[..., :head_dim],
        torch.empty(s_q, 1, topk, dtype=index_dtype),
        torch.empty(s_q, dtype=index_dtype) if lengths else None,
        torch.empty(heads) if sinks else None,
        head_dim**-0.5,
        -math.inf,
        torch.empty(s_q, heads, d_v + out_pad, dtype=dtype)[..., :d_v],
        torch.empty(s_q, heads),
        torch.empty(s_q, heads),
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
        torch.empty(tokens, heads, head_dim + q_pad, dtype=dtype)[..., :head_dim],
        torch.empty(tokens + 1, kv_heads, head_dim, dtype=dtype),
        torch.empty(tokens + 1, kv_heads, d_v, dtype=dtype),
        starts,
        starts,
        tokens,
        tokens,
        head_dim**-0.5,
        *window,
        -math.inf,
        torch.empty(tokens, heads, d_v + out_pad, dtype=dtype)[..., :d_v],
        torch.empty(heads, tokens).t(),
        arch=arch,
    )


def dense_prefill_backward(
    record: Recording,
    backend: str,
    tokens: int = 256,
    requests: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 192,
    d_v: int = 128,
    window: tuple[int, int] = (UNLIMITED, 0),
    dtype: torch.dtype = BF16,
    index_dtype: torch.dtype = torch.int32,
    dlse: bool = False,
    deterministic: bool = False,
    pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    def tensor(heads: int, width: int) -> torch.Tensor:
        return torch.empty(tokens, heads, width + pad, dtype=dtype)[..., :width]

    starts = torch.zeros(requests + 1, dtype=index_dtype)
    return record(
        "dense_prefill_backward",
        backend,
        tensor(heads, d_v),
        torch.empty(tokens, heads) if dlse else None,
        tensor(heads, head_dim),
        tensor(kv_heads, head_dim),
        tensor(kv_heads, d_v),
        tensor(heads, d_v),
        torch.empty(heads, tokens).t(),
        starts,
        starts,
        tokens,
        tokens,
        head_dim**-0.5,
        *window,
        deterministic,
        tensor(heads, head_dim),
        tensor(kv_heads, head_dim),
        tensor(kv_heads, d_v),
        arch=arch,
    )


def merge_states(
    record: Recording,
    backend: str,
    parts: int = 2,
    tokens: int = 64,
    heads: int = 16,
    width: int = 512,
    gap: int = 0,
    context_tokens: int | None = None,
    to_e4m3: bool = False,
    arch: int | None = 90,
) -> list[Recorded]:
    outs = [torch.zeros(tokens, heads + gap, width, dtype=BF16)[:, :heads] for _ in range(parts)]
    lses = [torch.zeros(heads, tokens).T for _ in range(parts)]
    scale = torch.ones(()) if to_e4m3 else None
    out = torch.zeros_like(outs[0], dtype=FP8 if to_e4m3 else BF16)
    lse = torch.zeros(tokens, heads)
    return record("merge_states", backend, outs, lses, out, lse, None, context_tokens, scale, 1.0, arch=arch)


def cache_write(
    record: Recording,
    backend: str,
    form: str = "v32",
    tokens: int = 100,
    pages: int = 8,
    page_size: int = 64,
    gap: int = 0,
    scale_rounding: str = "power_of_two",
    arch: int | None = 90,
) -> list[Recorded]:
    layout = kv_cache.get_format(form)
    rows = torch.zeros(tokens, layout.head_dim + gap, dtype=BF16)[:, : layout.head_dim]
    cache = kv_cache.allocate(form, pages, page_size)
    slots = torch.zeros(tokens, dtype=torch.int64)
    return record("cache_write", backend, cache, slots, rows, None, layout, None, 1.0, scale_rounding, arch=arch)


def cache_gather(
    record: Recording,
    backend: str,
    form: str = "v32",
    tokens: int = 100,
    requests: int = 4,
    pages: int = 8,
    page_size: int = 64,
    gap: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    layout = kv_cache.get_format(form)
    cache = kv_cache.allocate(form, pages, page_size)
    table = torch.zeros(requests, 8, dtype=torch.int32)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    out = torch.zeros(tokens, layout.head_dim + gap, dtype=BF16)[:, : layout.head_dim]
    return record("cache_gather", backend, cache, table, starts, None, layout, None, 1.0, out, arch=arch)


def cache_copy(
    record: Recording,
    backend: str,
    form: str = "v32",
    pairs: int = 3,
    pages: int = 8,
    page_size: int = 64,
    disjoint: bool = True,
    arch: int | None = 90,
) -> list[Recorded]:
    cache = kv_cache.allocate(form, pages, page_size)
    lists = [torch.zeros(pairs, dtype=torch.int64) for _ in range(2)]
    return record("cache_copy", backend, None, cache, *lists, disjoint, arch=arch)


def reshape_and_cache(
    record: Recording,
    backend: str,
    tokens: int = 100,
    heads: int = 8,
    widths: tuple[int, int] = (128, 128),
    pages: int = 8,
    page_size: int = 64,
    gap: int = 0,
    cache_dtype: torch.dtype = BF16,
    in_pieces: bool = False,
    per_token: bool = False,
    arch: int | None = 90,
) -> list[Recorded]:
    def side(width: int) -> tuple[Any, ...]:
        rows = torch.zeros(tokens, heads, width + gap, dtype=BF16)[..., :width]
        shape = (pages, page_size, heads, width // 16, 16) if in_pieces else (pages, page_size, heads, 1, width)
        scales = torch.zeros(pages, page_size, heads) if per_token else None
        return rows, torch.zeros(shape, dtype=cache_dtype), scales

    (key, k_cache, k_scale), (value, v_cache, v_scale) = map(side, widths)
    if in_pieces:
        k_cache = k_cache.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
    slots = torch.zeros(tokens, dtype=torch.int64)
    arguments = (key, k_cache, slots, k_scale, 1.0, value, v_cache, v_scale, 1.0)
    return record("reshape_and_cache", backend, *arguments, arch=arch)


def gather_records(
    record: Recording,
    backend: str,
    form: str = "v32",
    tokens: int = 100,
    requests: int = 4,
    pages: int = 8,
    page_size: int = 64,
    arch: int | None = 90,
) -> list[Recorded]:
    cache = kv_cache.allocate(form, pages, page_size)
    out = torch.zeros(tokens, cache.shape[-1], dtype=cache.dtype)
    table, starts = torch.zeros(requests, 8, dtype=torch.int32), torch.zeros(requests + 1, dtype=torch.int32)
    return record("gather_records", backend, cache, table, starts, None, kv_cache.get_format(form), out, arch=arch)


def pack_seq(
    record: Recording, backend: str, tokens: int = 100, requests: int = 3, arch: int | None = 90
) -> list[Recorded]:
    x, starts = torch.zeros(tokens, 1024, dtype=BF16), torch.zeros(requests + 1, dtype=torch.int32)
    return record("pack_seq", backend, x, starts, 0, torch.zeros(requests, tokens, 1024, dtype=BF16), arch=arch)


def unpack_seq(
    record: Recording, backend: str, tokens: int = 100, requests: int = 3, arch: int | None = 90
) -> list[Recorded]:
    packed, starts = torch.zeros(requests, tokens, 1024, dtype=BF16), torch.zeros(requests + 1, dtype=torch.int32)
    return record("unpack_seq", backend, packed, starts, torch.zeros(tokens, 1024, dtype=BF16), arch=arch)


def concat_mla_q(
    record: Recording, backend: str, tokens: int = 100, heads: int = 16, arch: int | None = 90
) -> list[Recorded]:
    parts = [torch.zeros(heads, tokens, width, dtype=BF16).transpose(0, 1) for width in (512, 64)]
    return record("concat_mla_q", backend, *parts, torch.zeros(tokens, heads, 576, dtype=BF16), arch=arch)


def compress(
    record: Recording,
    backend: str,
    form: str = "model1",
    ratio: int = 4,
    tokens: int = 100,
    requests: int = 4,
    pages: int = 8,
    page_size: int = 64,
    columns: int = 4,
    dtype: torch.dtype = torch.float32,
    with_state: bool = True,
    arch: int | None = 90,
) -> list[Recorded]:
    head_dim = 128 if form.startswith("index") else 512
    width = head_dim * (2 if ratio == 4 else 1)
    layout = kv_cache.get_format(form, head_dim)
    problem = CompressProblem(
        kv=torch.zeros(tokens, 2 * width, dtype=dtype)[:, :width],
        score=torch.zeros(tokens, 2 * width, dtype=dtype)[:, width:],
        ape=torch.zeros(ratio, width),
        weight=torch.zeros(head_dim),
        eps=1e-6,
        cos_sin=torch.zeros(100, 64),
        request_ids=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int64),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        cache=kv_cache.allocate(layout, pages, page_size),
        layout=layout,
        scale_rounding="power_of_two",
        state_cache=torch.zeros(9, page_size, 2 * width) if with_state else None,
        state_table=torch.zeros(requests, columns, dtype=torch.int32) if with_state else None,
    )
    return record("compress", backend, problem, arch=arch)


def index_workspace(
    record: Recording,
    backend: str,
    tokens: int = 100,
    requests: int = 4,
    topk: int = 512,
    arch: int | None = 90,
) -> list[Recorded]:
    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    lengths = ints(requests + 1), ints(requests), ints(requests)
    numbers = topk, 128, 4, 4096, 1024
    return record(
        "index_workspace", backend, ints(tokens, topk), *lengths, *numbers, ints(tokens, 640), ints(tokens), arch=arch
    )


def latent_rows(
    record: Recording,
    backend: str,
    tokens: int = 8,
    pages: int = 3,
    interleaved: bool = True,
    with_cache: bool = True,
    arch: int | None = 90,
) -> list[Recorded]:
    kv_a, q_a = torch.zeros(tokens, 576, dtype=BF16), torch.zeros(tokens, 1536, dtype=BF16)
    where = torch.zeros(tokens, dtype=torch.int64)
    return record(
        "latent_rows",
        backend,
        kv_a,
        torch.zeros(512, dtype=BF16),
        1e-6,
        torch.zeros(100, 64),
        where,
        interleaved,
        q_a,
        torch.zeros(1536, dtype=BF16),
        1e-6,
        where if with_cache else None,
        torch.empty_like(kv_a),
        torch.empty_like(q_a),
        kv_cache.allocate("bf16", pages, 64) if with_cache else None,
        arch=arch,
    )


def rotate_heads(
    record: Recording,
    backend: str,
    tokens: int = 8,
    heads: int = 128,
    interleaved: bool = True,
    arch: int | None = 90,
) -> list[Recorded]:
    query, folded = torch.zeros(tokens, heads, 192, dtype=BF16), torch.zeros(tokens, heads, 576, dtype=BF16)
    table, where = torch.zeros(100, 64), torch.zeros(tokens, dtype=torch.int64)
    return record("rotate_heads", backend, query[..., 128:], table, where, interleaved, folded[..., 512:], arch=arch)


def row_format(form: str, head_dim: int) -> CacheFormat:
    """The format of a name; with rows of this width, if they may have any."""
    return kv_cache.get_format(form, None if form in ("v32", "model1") else head_dim)


CALLS: dict[str, Any] = {
    function.__name__: function
    for function in (
        dense_decode,
        paged_attention,
        sparse_decode,
        sparse_prefill,
        dense_prefill,
        dense_prefill_backward,
        cache_copy,
        compress,
        concat_mla_q,
        gather_records,
        index_workspace,
        pack_seq,
        reshape_and_cache,
        unpack_seq,
        merge_states,
        cache_write,
        cache_gather,
        latent_rows,
        rotate_heads,
    )
}
