"""Calls of the implementations of backward passes and of the indexer's loss, with tensors of arbitrary contents."""

from __future__ import annotations

import math

import torch
from support.attention_calls import BF16, UNLIMITED
from support.recording import Recorded, Recording

from flashlatte.ops.dense_prefill.reference import DensePrefillGradients, DensePrefillParams
from flashlatte.ops.indexer_loss.reference import IndexerLossParams, IndexerLossResults
from flashlatte.ops.sparse_attention.reference import SparseAttentionBackwardParams, SparseAttentionGradients


def sparse_attention_backward(
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
    dlse: bool = False,
    deterministic: bool = False,
    kv_pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    q = torch.empty(s_q, heads, head_dim, dtype=dtype)
    params = SparseAttentionBackwardParams(
        dout=torch.empty(s_q, heads, d_v, dtype=dtype),
        dlse=torch.empty(s_q, heads) if dlse else None,
        q=q,
        kv=torch.empty(s_kv, 1, head_dim + kv_pad, dtype=dtype)[..., :head_dim],
        indices=torch.zeros(s_q, 1, topk, dtype=index_dtype),
        topk_length=torch.zeros(s_q, dtype=index_dtype) if lengths else None,
        attn_sink=torch.empty(heads) if sinks else None,
        out=torch.empty(s_q, heads, d_v, dtype=dtype),
        lse=torch.empty(s_q, heads),
        softmax_scale=head_dim**-0.5,
        deterministic=deterministic,
    )
    gradients = SparseAttentionGradients(
        torch.empty_like(q), torch.empty(s_kv, 1, head_dim, dtype=dtype), torch.empty(heads)
    )
    return record("sparse_attention_backward", backend, params, gradients, arch=arch)


def indexer_loss(
    record: Recording,
    backend: str,
    s_q: int = 8,
    heads: int = 128,
    head_dim: int = 576,
    index_heads: int = 64,
    index_dim: int = 128,
    s_kv: int = 64,
    topk: int | None = 256,
    dtype: torch.dtype = BF16,
    weights_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    lengths: bool = False,
    with_lse: bool = False,
    use_relu: bool = True,
    deterministic: bool = False,
    with_gradient: bool = True,
    kv_pad: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    """``topk`` None: a range of keys."""
    in_range = torch.zeros(s_q, dtype=index_dtype) if topk is None else None
    shapes = ((s_q, index_heads, index_dim), (s_kv, index_dim), (s_q, index_heads)) if with_gradient else ((0,),) * 3
    params = IndexerLossParams(
        index_q=torch.empty(s_q, index_heads, index_dim, dtype=dtype),
        index_k=torch.empty(s_kv, index_dim, dtype=dtype),
        index_weights=torch.empty(s_q, index_heads, dtype=weights_dtype),
        q=torch.empty(s_q, heads, head_dim, dtype=dtype),
        kv=torch.empty(s_kv, 1, head_dim + kv_pad, dtype=dtype)[..., :head_dim],
        lse=torch.empty(s_q, heads) if with_lse else None,
        indices=None if topk is None else torch.zeros(s_q, 1, topk, dtype=index_dtype),
        topk_length=torch.zeros(s_q, dtype=index_dtype) if lengths else None,
        key_start=in_range,
        key_end=in_range,
        softmax_scale=head_dim**-0.5,
        index_scale=index_dim**-0.5,
        use_relu=use_relu,
        deterministic=deterministic,
        group=None,
        with_gradient=with_gradient,
    )
    results = IndexerLossResults(
        torch.empty(()),
        torch.empty((), dtype=torch.int64),
        torch.empty(shapes[0], dtype=dtype),
        torch.empty(shapes[1]),
        torch.empty(shapes[2]),
    )
    return record(
        "indexer_loss",
        backend,
        params,
        results,
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
        DensePrefillParams(
            q=tensor(heads, head_dim),
            k=tensor(kv_heads, head_dim),
            v=tensor(kv_heads, d_v),
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_k=tokens,
            softmax_scale=head_dim**-0.5,
            window_left=window[0],
            window_right=window[1],
            empty_lse=-math.inf,
        ),
        DensePrefillGradients(
            tensor(heads, d_v),
            torch.empty(heads, tokens).t(),
            tensor(heads, d_v),
            torch.empty(tokens, heads) if dlse else None,
            deterministic,
            tensor(heads, head_dim),
            tensor(kv_heads, head_dim),
            tensor(kv_heads, d_v),
        ),
        arch=arch,
    )
