"""MLA attention in absorbed form: kv_b_proj is folded into the query and applied to the output; keys stay latent.

With W_UK and W_UV the two parts of a head's kv_b_proj, q · (W_UK c) = (W_UKᵀ q) · c and Σ p (W_UV c) = W_UV Σ p c
(DeepSeek-V2, arXiv:2405.04434, §2.1.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashlatte.kernels.softmax import sink_weight
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.config import MLAConfig
from flashlatte.layers.fused_projections import bmm_into
from flashlatte.layers.metadata import DecodePart
from flashlatte.layers.selection import SelectionChunk
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.ops.sparse_prefill import sparse_prefill

# Requests with more new tokens are prefill. The decode kernels are built for few queries, and over a history the
# multi-head form needs fewer FLOPs from kv_lora_rank * (nope + v) / (2 * kv_lora_rank - nope - v) = 170 queries on
# (DeepSeek-V3).
MAX_ABSORBED_QUERIES = 16
# Bound on the absorbed queries of one prefill call: they have 576 elements, against 192 in multi-head form.
MAX_QUERY_BYTES = 2**28


def check_precision(decode_precision: str | None, config: MLAConfig) -> None:
    """Raise ValueError for an unknown precision, or one that decode of a layer with this config does not support.

    ``sparse_decode`` has no ``precision``, and the lse of ``precision="fp8"`` is too inexact for an attention sink.
    """
    if decode_precision not in (None, "fp8"):
        raise ValueError(f"decode_precision must be None or 'fp8', got {decode_precision!r}")
    for part in ("indexer", "window", "attn_sink") if decode_precision else ():
        if value := getattr(config, part):
            raise ValueError(f"decode_precision={decode_precision!r} needs a config without {part}, got {value}")


def up_projections(kv_b: torch.Tensor, nope_dim: int, v_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK [h, nope, latent] and W_UV [h, v, latent] as views of kv_b_proj's weight [h · (nope + v), latent]."""
    per_head = kv_b.unflatten(0, (-1, nope_dim + v_dim))
    return per_head[:, :nope_dim], per_head[:, nope_dim:]


def fold_query(q_nope: torch.Tensor, w_uk: torch.Tensor, out: torch.Tensor) -> None:
    """Map queries [T, h, nope] to queries over the latent, into ``out`` [T, h, latent], which may be strided."""
    bmm_into(q_nope.transpose(0, 1), w_uk, out.transpose(0, 1))


def unfold_value(latent: torch.Tensor, w_uv: torch.Tensor, out: torch.Tensor) -> None:
    """Map attention outputs over latents [T, h, latent] to values, into ``out`` [T, h, v]."""
    bmm_into(latent.transpose(0, 1), w_uv.transpose(1, 2), out.transpose(0, 1))


def attend_pages(
    query: torch.Tensor,
    cache: LatentCache,
    part: DecodePart | None,
    indices: torch.Tensor | None,
    softmax_scale: float,
    backend: str | None,
    batch_invariant: bool = False,
    sink: torch.Tensor | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Attention of queries [T, h, head_dim] over cached tokens, the new ones included: [T, h, value_dim].

    Args:
        part: the decode part that the queries belong to; None if ``indices`` is given.
        indices: int [T, topk], the slots that each query attends to; None: all tokens of its request up to its own.
        backend: backend of the decode operation.
        batch_invariant: passed to the decode operation; no effect if keys are sharded over ranks.
        sink: float32 [h], a logit in the denominator of each head's softmax; None: none. Not with sharded keys.
        precision: passed to ``dense_decode``; not with ``indices``, sharded keys or another format than ``fp8``.
    """
    sharded = None if part is None else part.sharded
    if sharded is not None and sink is not None:
        raise ValueError("attention sinks need the whole cache on each rank, got sharded keys")
    if indices is not None:
        if sharded is not None:
            return sharded.attend_selected(query, cache, indices, softmax_scale, backend)
        return attend_selected(query, cache, indices, softmax_scale, backend, batch_invariant, sink)
    if part is None:
        raise ValueError("metadata must have a decode part for queries in absorbed form, got decode=None")
    queries = _by_request(query, part)
    if sharded is not None:
        return _by_token(sharded.attend(queries, cache, softmax_scale, backend), part)
    common: dict[str, Any] = {"softmax_scale": softmax_scale, "head_dim_v": cache.value_dim}
    common |= {"batch_invariant": batch_invariant, "backend": backend}
    if cache.layout.plain:
        out, lse = dense_decode(
            queries,
            cache.pages,
            part.block_table,
            part.seq_lens,
            causal=part.queries > 1,
            k_scale=cache.scale,
            precision=precision,
            **common,
        )
        apply_sink(out, lse.transpose(1, 2), sink)
        return _by_token(out, part)
    # dense_decode would need a dequantized copy of the whole history at every step. sparse_decode reads the stored
    # bytes, given the slots of all tokens.
    if part.all_slots is None:
        raise ValueError(
            f"metadata must be built for the cache's format {cache.layout.name}: MLAMetadataBuilder(cache_format=…)"
        )
    out, _ = sparse_decode(
        queries,
        cache.pages,
        part.all_slots[:, None].expand(-1, part.queries, -1),
        cache_format=cache.layout,
        topk_length=part.visible_lens,
        attn_sink=sink,
        **common,
    )
    return _by_token(out, part)


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> None:
    """Multiply attention's outputs [..., h, v] in place by e^lse / (e^lse + e^sink), for lse [..., h] and sink [h].

    Rows without keys (lse -inf) stay 0 with any sink.
    """
    if sink is not None:
        out.mul_(sink_weight(lse, sink).to(out.dtype)[..., None])


def attend_selected(
    query: torch.Tensor,
    cache: LatentCache,
    indices: torch.Tensor,
    softmax_scale: float,
    backend: str | None,
    batch_invariant: bool = False,
    sink: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries [T, h, head_dim], each over its selected slots ``indices`` (int [T, topk]).

    ``query_rope`` [T, h, rope]: the last columns of the queries, if ``query`` has only the others.
    """
    out, _ = sparse_decode(
        query[:, None],
        cache.pages,
        indices[:, None],
        q_rope=None if query_rope is None else query_rope[:, None],
        cache_format=cache.layout,
        attn_sink=sink,
        softmax_scale=softmax_scale,
        head_dim_v=cache.value_dim,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    return out.squeeze(1)


def _by_request(query: torch.Tensor, part: DecodePart) -> torch.Tensor:
    """Reshape a flat batch to [requests, queries, h, head_dim], padded if requests have different numbers of tokens."""
    if part.pad_index is not None:
        query = query[part.pad_index]
    return query.view(part.requests, part.queries, *query.shape[1:])


def _by_token(out: torch.Tensor, part: DecodePart) -> torch.Tensor:
    out = out.flatten(0, 1)
    return out if part.unpad_index is None else out[part.unpad_index]


def query_slices(first: int, last: int, query: torch.Tensor) -> Iterator[slice]:
    """Split tokens ``first`` to ``last`` - 1 into slices whose absorbed queries fit ``MAX_QUERY_BYTES``."""
    # An absorbed query has 576 elements, one in multi-head form 192: four times its bytes is an upper bound.
    bytes_per_token = 4 * query.shape[1] * query.shape[2] * query.element_size()
    count = max(MAX_QUERY_BYTES // bytes_per_token, 1)
    for begin in range(first, last, count):
        yield slice(begin, min(begin + count, last))


def chunk_rows(cache: LatentCache, chunk: SelectionChunk, dtype: torch.dtype) -> torch.Tensor | None:
    """Rows [n, 1, head_dim] that the chunk's selected indices refer to: gathered rows, or a view of the cache.

    None if ``sparse_prefill`` cannot read the cache's format. The indices are then slots for ``sparse_decode``.
    """
    if chunk.sharded is not None:
        return chunk.sharded.latents(cache, dtype).unsqueeze(1)
    if chunk.use_gathered_rows:
        return cache.gather(chunk.block_table, chunk.cu_keys, chunk.num_keys, dtype).unsqueeze(1)
    if cache.layout.plain and cache.pages.dtype == dtype and cache.pages.is_contiguous():
        return cache.pages.flatten(0, 1)
    return None


def attend_selected_rows(
    query: torch.Tensor,
    cache: LatentCache,
    rows: torch.Tensor | None,
    indices: torch.Tensor,
    softmax_scale: float,
    backend: str | None,
    sink: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries [T, h, head_dim], each over ``indices`` (int32 [T, topk]) of rows, or of slots.

    ``query_rope``: as for ``attend_selected``.
    """
    if rows is None:
        return attend_selected(query, cache, indices, softmax_scale, backend, sink=sink, query_rope=query_rope)
    out, _, _ = sparse_prefill(
        query,
        rows,
        indices.unsqueeze(1),
        softmax_scale,
        q_rope=query_rope,
        d_v=cache.value_dim,
        attn_sink=sink,
        backend=backend,
    )
    return out
