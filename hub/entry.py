"""Multi-head Latent Attention (MLA) in Triton and Gluon: decode, prefill, the sparse-attention indexer, KV caches.

An operation chooses among its implementations: "hopper" (Gluon, SM90), "portable" (Triton, any GPU) and "reference"
(PyTorch, any device); ``backend=`` names one. ``kv_cache`` allocates, writes and reads caches.

Source and documentation: https://github.com/flashlatte/flashlatte
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashlatte import kv_cache
from flashlatte.ops.compress import compress
from flashlatte.ops.concat_mla_q import concat_mla_q
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.dense_prefill import dense_prefill, vit_attention
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.index_logits import index_logits, paged_index_logits, sparse_index_logits
from flashlatte.ops.index_quantize import index_gather, index_quantize
from flashlatte.ops.index_query import index_query, index_query_mxfp4
from flashlatte.ops.index_select import index_select, paged_index_select
from flashlatte.ops.index_workspace import index_workspace
from flashlatte.ops.indexer_loss import indexer_loss
from flashlatte.ops.inverse_rope_quantize import inverse_rope_quantize
from flashlatte.ops.merge_states import merge_attn_states, merge_states
from flashlatte.ops.pack_seq import pack_seq, unpack_seq
from flashlatte.ops.paged_attention import paged_attention
from flashlatte.ops.q_kv_norm import q_kv_norm
from flashlatte.ops.reshape_and_cache import reshape_and_cache
from flashlatte.ops.rotate_and_cache import rotate_and_cache
from flashlatte.ops.sparse_attention import sparse_attention
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.ops.sparse_prefill import sparse_prefill
from flashlatte.ops.topk import topk
from flashlatte.ops.turboquant_decode import turboquant_decode
from flashlatte.ops.turboquant_gather import turboquant_gather
from flashlatte.ops.turboquant_store import turboquant_store
from flashlatte.runtime import lazy

__all__ = [
    "compress",
    "concat_mla_q",
    "dense_decode",
    "dense_prefill",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "index_convert",
    "index_gather",
    "index_logits",
    "index_quantize",
    "index_query",
    "index_query_mxfp4",
    "index_select",
    "index_workspace",
    "indexer_loss",
    "inverse_rope_quantize",
    "kv_cache",
    "merge_attn_states",
    "merge_states",
    "pack_seq",
    "paged_attention",
    "paged_index_logits",
    "paged_index_select",
    "q_kv_norm",
    "reshape_and_cache",
    "rotate_and_cache",
    "sparse_attention",
    "sparse_decode",
    "sparse_index_logits",
    "sparse_prefill",
    "topk",
    "turboquant_decode",
    "turboquant_gather",
    "turboquant_store",
    "unpack_seq",
    "vit_attention",
]

lazy.declare(
    "flashlatte.kv_cache",
    {
        "copy_blocks": "flashlatte.ops.cache_copy:copy_blocks",
        "gather": "flashlatte.ops.cache_gather:cache_gather",
        "gather_last": "flashlatte.ops.cache_gather:gather_last",
        "gather_records": "flashlatte.ops.gather_records:gather_records",
        "rope_write": "flashlatte.ops.rope_cache_write:rope_cache_write",
        "swap_blocks": "flashlatte.ops.cache_copy:swap_blocks",
        "to_cache_indices": "flashlatte.ops.index_convert:to_cache_indices",
        "write": "flashlatte.ops.cache_write:cache_write",
    },
)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """``dense_prefill`` with FlashAttention's arguments, which transformers calls for an ``attn_implementation``.

    Args:
        q: [T_q, h, d_qk], bf16 or fp16 (float32 on the reference).
        k, v: [T_k, h_k, d_qk] and [T_k, h_k, d_v] in q's dtype. h is a multiple of h_k.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [b + 1], cumulative lengths of the requests.
        max_seqlen_q, max_seqlen_k: length of the longest request. A tensor is read, which synchronizes with its device.
        softmax_scale: above 0; d_qk^-0.5 if None.
        causal: bottom-right alignment: the last query of a request sees all of its keys.
        window_size: keys to the left and right of a query's position that it sees; -1 is no bound.
        deterministic: gradients are bitwise the same from run to run.
        dropout_p, softcap, s_aux, block_table: not implemented; only 0 and None are accepted.

    Returns:
        [T_q, h, d_v] in q's dtype. Gradients flow to q, k and v.

    Raises:
        TypeError, ValueError: arguments that ``dense_prefill`` refuses, or that are not implemented.
    """
    _refuse({"dropout_p": dropout_p, "softcap": softcap}, {"s_aux": s_aux, "block_table": block_table})
    out, _ = dense_prefill(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        softmax_scale=softmax_scale,
        causal=causal,
        window=window_size,
        deterministic=deterministic,
    )
    return out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """``flash_attn_varlen_func`` for requests of equal length.

    Args:
        q: [b, s_q, h, d_qk].
        k, v: [b, s_k, h_k, d_qk] and [b, s_k, h_k, d_v].
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, s_aux: as in ``flash_attn_varlen_func``.

    Returns:
        [b, s_q, h, d_v] in q's dtype.

    Raises:
        TypeError, ValueError: as ``flash_attn_varlen_func``; tensors without four axes, or of different batch sizes.
    """
    for name, value in {"q": q, "k": k, "v": v}.items():
        if value.dim() != 4 or value.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have shape [{q.shape[0]}, tokens, heads, head_dim], got {list(value.shape)}")
    batch, s_q, s_k = q.shape[0], q.shape[1], k.shape[1]
    boundaries = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out = flash_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        boundaries * s_q,
        boundaries * s_k,
        s_q,
        s_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        s_aux=s_aux,
    )
    return out.unflatten(0, (batch, s_q))


def _refuse(zero: dict[str, float], none: dict[str, object]) -> None:
    """Refuse arguments of FlashAttention that would change the result and are not implemented."""
    for name, value in zero.items():
        if value:
            raise ValueError(f"{name} must be 0, as it is not implemented, got {value}")
    for name, value in none.items():
        if value is not None:
            raise ValueError(f"{name} must be None, as it is not implemented, got {type(value).__name__}")
