"""Attention in absorbed form over the pages: through which operation, and that call."""

from __future__ import annotations

import torch

from flashlatte.layers.cache import LatentCache
from flashlatte.layers.metadata import DecodePart
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.sparse_decode import sparse_decode


def attend_pages(
    query: torch.Tensor,
    cache: LatentCache,
    part: DecodePart | None,
    indices: torch.Tensor | None,
    softmax_scale: float,
    backend: str | None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Attention of queries [T, h, head_dim] over cached tokens, their own among them: [T, h, value_dim].

    Args:
        part: whose the queries are; None beside ``indices``.
        indices: int [T, topk], the slots that each query attends to; None: all of its request up to its own.
        backend: of the operation that reads the pages.
        batch_invariant: of the operation; over ranks it has no effect.
    """
    over_ranks = None if part is None else part.over_ranks
    if indices is not None:
        if over_ranks is not None:
            return over_ranks.attend_selected(query, cache, indices, softmax_scale, backend)
        return attend_selected(query, cache, indices, softmax_scale, backend, batch_invariant)
    if part is None:
        raise ValueError("metadata has no decode part, and there are queries that attend in absorbed form")
    if over_ranks is not None:
        return _by_token(over_ranks.attend(_by_request(query, part), cache, softmax_scale, backend), part)
    if cache.layout.plain:
        return _attend_dense(query, cache, part, softmax_scale, backend, batch_invariant)
    # To read another format through dense_decode would take a dequantised copy of the whole history at every step;
    # sparse_decode reads its bytes, given the slots of every token.
    return _attend_every_slot(query, cache, part, softmax_scale, backend, batch_invariant)


def _attend_dense(
    query: torch.Tensor,
    cache: LatentCache,
    part: DecodePart,
    softmax_scale: float,
    backend: str | None,
    batch_invariant: bool,
) -> torch.Tensor:
    out, _ = dense_decode(
        _by_request(query, part),
        cache.pages,
        part.block_table,
        part.seq_lens,
        head_dim_v=cache.value_dim,
        softmax_scale=softmax_scale,
        causal=part.queries > 1,
        k_scale=cache.scale,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    return _by_token(out, part)


def _attend_every_slot(
    query: torch.Tensor,
    cache: LatentCache,
    part: DecodePart,
    softmax_scale: float,
    backend: str | None,
    batch_invariant: bool,
) -> torch.Tensor:
    if part.every_slot is None:
        raise ValueError(
            f"metadata must be built for the cache's format {cache.layout.name}: MLAMetadataBuilder(cache_format=…)"
        )
    out, _ = sparse_decode(
        _by_request(query, part),
        cache.pages,
        part.every_slot[:, None].expand(-1, part.queries, -1),
        cache_format=cache.layout,
        topk_length=part.seen,
        softmax_scale=softmax_scale,
        head_dim_v=cache.value_dim,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    return _by_token(out, part)


def attend_selected(
    query: torch.Tensor,
    cache: LatentCache,
    indices: torch.Tensor,
    softmax_scale: float,
    backend: str | None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Attention of queries [T, h, head_dim], each over the slots that it selected (int [T, topk])."""
    out, _ = sparse_decode(
        query[:, None],
        cache.pages,
        indices[:, None],
        cache_format=cache.layout,
        softmax_scale=softmax_scale,
        head_dim_v=cache.value_dim,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    return out.squeeze(1)


def _by_request(query: torch.Tensor, part: DecodePart) -> torch.Tensor:
    """[requests, queries, h, head_dim]."""
    if part.pad_index is not None:
        query = query[part.pad_index]
    return query.view(part.requests, part.queries, *query.shape[1:])


def _by_token(out: torch.Tensor, part: DecodePart) -> torch.Tensor:
    out = out.flatten(0, 1)
    return out if part.unpad_index is None else out[part.unpad_index]
