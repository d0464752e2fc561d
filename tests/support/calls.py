"""Calls of all implementations, with tensors of arbitrary contents: those of other modules, and elementwise ones."""

from __future__ import annotations

from typing import Any

import torch
from support.attention_calls import (
    BF16,
    dense_decode,
    dense_prefill,
    paged_attention,
    sparse_decode,
    sparse_prefill,
)
from support.backward_calls import dense_prefill_backward, indexer_loss, sparse_attention_backward
from support.cache_calls import (
    cache_copy,
    cache_gather,
    cache_write,
    compress,
    gather_records,
    reshape_and_cache,
    rope_cache_write,
    rotate_and_cache,
)
from support.recording import Recorded, Recording
from support.turboquant_calls import turboquant_decode, turboquant_gather, turboquant_store

from flashlatte import kv_cache
from flashlatte.ops.index_workspace.reference import IndexWorkspaceParams
from flashlatte.ops.merge_states.reference import MergeStatesParams
from flashlatte.ops.mhc.reference import MhcPreParams
from flashlatte.ops.norm_rope.reference import LatentRowsParams
from flashlatte.ops.q_kv_norm.reference import QKvNormParams
from flashlatte.ops.topk.reference import TopkParams

FP16, FP8 = torch.float16, torch.float8_e4m3fn


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
    params = MergeStatesParams(outs, lses, out, lse, None, context_tokens, scale, 1.0)
    return record("merge_states", backend, params, arch=arch)


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
    params = IndexWorkspaceParams(ints(tokens, topk), *lengths, *numbers, ints(tokens, 640), ints(tokens))
    return record("index_workspace", backend, params, arch=arch)


def q_kv_norm(
    record: Recording, backend: str, tokens: int = 100, dtype: torch.dtype = BF16, arch: int | None = 90
) -> list[Recorded]:
    both = torch.zeros(tokens, 1536, dtype=dtype)
    q, kv = both.split((1024, 512), dim=1)
    outs = torch.empty_like(q), torch.empty_like(kv)
    params = QKvNormParams(q, kv, torch.zeros(1024), torch.zeros(512), 1e-6, *outs)
    return record("q_kv_norm", backend, params, arch=arch)


def inverse_rope_quantize(
    record: Recording,
    backend: str,
    tokens: int = 100,
    heads: int = 64,
    groups: int = 8,
    packed: bool = False,
    dtype: torch.dtype = BF16,
    arch: int | None = 90,
) -> list[Recorded]:
    o, where = torch.zeros(tokens, heads, 512, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
    values = torch.zeros(groups, tokens, heads // groups * 512, dtype=torch.uint8)
    columns, padded = heads // groups * (1 if packed else 4), -(-tokens // 4) * 4
    scales = torch.zeros(groups, columns, padded, dtype=torch.int32 if packed else torch.float32)
    return record("inverse_rope_quantize", backend, o, torch.zeros(100, 64), where, values, scales, arch=arch)


def topk(
    record: Recording,
    backend: str,
    rows: int = 64,
    width: int = 131_072,
    k: int = 2048,
    dtype: torch.dtype = torch.float32,
    with_start: bool = False,
    with_values: bool = False,
    page_size: int = 0,
    by_id: bool = False,
    arch: int | None = 90,
) -> list[Recorded]:
    """Slots of pages of ``page_size`` if it is not 0."""
    ends = torch.empty(rows, dtype=torch.int32)
    logits = torch.empty(1, 1, dtype=dtype).expand(rows, width)
    indices, values = torch.empty(rows, k, dtype=torch.int32), torch.empty(rows, k) if with_values else None
    start = ends if with_start else None
    pages: tuple[Any, ...] = ()
    if page_size:
        pages = torch.empty(rows, -(-width // page_size), dtype=torch.int32), page_size, ends if by_id else None
    return record("topk", backend, TopkParams(logits, start, ends, 1, indices, values, *pages), arch=arch)


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
    table, where = torch.zeros(100, 64), torch.zeros(tokens, dtype=torch.int64)
    slots, cache = (where, kv_cache.allocate("bf16", pages, 64)) if with_cache else (None, None)
    params = LatentRowsParams(
        kv_a=kv_a,
        weight=torch.zeros(512, dtype=BF16),
        eps=1e-6,
        table=table,
        positions=where,
        interleaved=interleaved,
        q_a=q_a,
        q_weight=torch.zeros(1536, dtype=BF16),
        q_eps=1e-6,
        slot_mapping=slots,
        rows=torch.empty_like(kv_a),
        q_out=torch.empty_like(q_a),
        cache=cache,
    )
    return record("latent_rows", backend, params, arch=arch)


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


def index_weights(
    record: Recording, backend: str, tokens: int = 8, heads: int = 64, gap: int = 0, arch: int | None = 90
) -> list[Recorded]:
    hidden = torch.zeros(tokens, 7168 + gap, dtype=BF16)[:, :7168]
    return record("index_weights", backend, hidden, torch.zeros(heads, 7168), torch.zeros(tokens, heads), arch=arch)


def mhc_pre(
    record: Recording,
    backend: str,
    tokens: int = 8,
    width: int = 4096,
    arch: int | None = 90,
) -> list[Recorded]:
    streams, numbers = torch.zeros(tokens, 4, width, dtype=BF16), torch.zeros(tokens, 24)
    made = torch.zeros(tokens, 4), torch.zeros(tokens, 4, 4), torch.zeros(tokens, width, dtype=BF16)
    params = MhcPreParams(streams, numbers, numbers[0], numbers[0, :3], 1e-6, 1e-6, 20, *made)
    return record("mhc_pre", backend, params, arch=arch)


def mhc_post(
    record: Recording,
    backend: str,
    tokens: int = 8,
    width: int = 4096,
    arch: int | None = 90,
) -> list[Recorded]:
    result, streams = torch.zeros(tokens, width, dtype=BF16), torch.zeros(tokens, 4, width, dtype=BF16)
    shares, mixture = torch.zeros(tokens, 4), torch.zeros(tokens, 4, 4)
    return record("mhc_post", backend, result, streams, shares, mixture, torch.empty_like(streams), arch=arch)


CALLS: dict[str, Any] = {
    function.__name__: function
    for function in (
        dense_decode,
        paged_attention,
        sparse_decode,
        sparse_prefill,
        sparse_attention_backward,
        dense_prefill,
        dense_prefill_backward,
        indexer_loss,
        cache_copy,
        compress,
        concat_mla_q,
        gather_records,
        index_weights,
        index_workspace,
        mhc_post,
        mhc_pre,
        pack_seq,
        inverse_rope_quantize,
        q_kv_norm,
        rotate_and_cache,
        reshape_and_cache,
        rope_cache_write,
        unpack_seq,
        merge_states,
        topk,
        cache_write,
        cache_gather,
        latent_rows,
        rotate_heads,
        turboquant_decode,
        turboquant_gather,
        turboquant_store,
    )
}
