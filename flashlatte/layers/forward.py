"""The forward pass of an MLA layer, for any module with transformers' names of the projections."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from flashlatte import kv_cache
from flashlatte.layers.absorbed import (
    attend_pages,
    attend_selected_rows,
    chunk_rows,
    fold_query,
    query_slices,
    unfold_value,
    up_projections,
)
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.fused_projections import fused_linear
from flashlatte.layers.indexer import OverlappedIndexer, StepIndexer
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.layers.parts import (
    Projections,
    QueryLatent,
    eps_of,
    has_query_latent,
    hidden_projections,
    key_rope_norm,
    latent_factor,
    owns_latents,
    project_output,
    project_query,
    sinks,
    softmax_scale,
)
from flashlatte.layers.prefill import Expansion, attend_heads
from flashlatte.layers.selection import IndexSelection, SelectionChunk
from flashlatte.layers.weights import linear_weight, norm_weight
from flashlatte.ops.norm_rope import Rotary, latent_rows, rotate_heads


def forward(
    module: Projections,
    hidden: torch.Tensor,
    cache: LatentCache,
    metadata: MLAMetadata,
    rotary: Rotary,
    *,
    indices: torch.Tensor | None = None,
    indexer: StepIndexer | None = None,
    query_factors: torch.Tensor | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
    decode_precision: str | None = None,
) -> torch.Tensor:
    """Store the latents of a flat batch [T, hidden_size] in the cache and compute its attention: [T, hidden_size].

    Args:
        rotary: rotation of the T tokens.
        indices: int [T, topk], the slots that each token attends to, all in absorbed form; None: the metadata's
            selection, or every token of its request up to its own.
        indexer: stores the index keys and fills the metadata's selection; None for a module that reuses another's
            selection, or attends to every token.
        query_factors: [T] or [T, h], factors of each token's queries; None: none.
        backend: backend of the operations that read the cache.
        batch_invariant: passed to the decode operation.
        decode_precision: ``precision`` of ``dense_decode``.
    """
    # Both forms of attention need it. Raise for an unreadable weight before anything is stored.
    kv_b = linear_weight(module, "kv_b_proj", hidden.dtype)
    selection = metadata.selection
    overlapped = None
    if indexer is not None:
        overlapped = OverlappedIndexer(indexer, hidden, metadata, selection if indices is None else None)
        overlapped.start()
    rows, q_latent = store_latents(module, hidden, rotary, cache, metadata.slot_mapping)
    sink = sinks(module)
    if overlapped is not None:
        overlapped.select(hidden if q_latent is None else q_latent.normalized)
    query, gate = project_query(module, hidden, q_latent, query_factors)
    tokens, heads = query.shape[:2]
    out = query.new_empty(tokens, heads, module.v_head_dim)
    absorbed = tokens if indices is not None else metadata.num_decode_tokens
    if absorbed:
        parts = (slice(0, absorbed),) if indices is None else query_slices(0, absorbed, query)
        if indices is None and selection is not None and selection.slots is not None:
            indices = selection.slots[:absorbed]

        def attend(folded: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
            if overlapped is not None:
                overlapped.join()
            return attend_pages(
                folded,
                cache,
                metadata.decode,
                chosen,
                softmax_scale(module),
                backend,
                batch_invariant,
                sink,
                decode_precision,
            )

        for part in parts:
            attend_part = functools.partial(attend, chosen=None if indices is None else indices[part])
            rotation = rotary.part(part.start, part.stop)
            _attend_absorbed(module, kv_b, query[part], cache, rotation, backend, attend_part, out[part])
    if absorbed == tokens:
        return project_output(module, out, gate)
    if selection is not None and selection.chunks is not None:
        _attend_chunks(module, kv_b, query, cache, selection, selection.chunks, absorbed, rotary, backend, out)
    elif metadata.prefill is not None:
        query = query[absorbed:]
        rotate_query(module, query, rotary.part(absorbed))
        expand = Expansion(
            functools.partial(functional.linear, weight=kv_b),
            module.kv_lora_rank,
            module.qk_nope_head_dim,
            module.qk_rope_head_dim,
            module.v_head_dim,
        )
        part, scale = metadata.prefill, softmax_scale(module)
        if rows is None:
            rows = read_rows(cache, metadata.slot_mapping, query.dtype)
        attend_heads(query, rows[absorbed:], cache, part, expand, scale, out[absorbed:], sink)
    return project_output(module, out, gate)


def project(
    module: Projections,
    hidden: torch.Tensor,
    rotary: Rotary,
    cache: LatentCache,
    slot_mapping: torch.Tensor,
    query_factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, QueryLatent | None]:
    """``store_latents`` and ``project_query``: queries, the gate's logits, rows and the query's latent."""
    rows, q_latent = store_latents(module, hidden, rotary, cache, slot_mapping)
    if rows is None:
        rows = read_rows(cache, slot_mapping, hidden.dtype)
    return *project_query(module, hidden, q_latent, query_factors), rows, q_latent


def store_latents(
    module: Projections, hidden: torch.Tensor, rotary: Rotary, cache: LatentCache, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor | None, QueryLatent | None]:
    """Project the tokens' rows [T, latent + rope] and store them; also return the query's latent.

    The rows are None if an earlier layer has stored them, the query's latent if the module projects queries directly.
    """
    if not owns_latents(module):
        return None, _query_latent(module, hidden)
    query_latent: dict[str, Any] = {}
    *q_a, kv_a = fused_linear(hidden, *hidden_projections(module))
    if q_a:
        q_weight = norm_weight(module, "q_a_layernorm")
        query_latent = {"q_a": q_a[0], "q_weight": q_weight, "q_eps": eps_of(module.q_a_layernorm)}
    if key_rope_norm(module) is not None:
        _normalize_rope(module, kv_a[:, module.kv_lora_rank :])
    # latent_rows also stores the rows in an unquantized cache. Other formats have their own write kernels.
    target: dict[str, Any] = {} if cache.is_quantized else {"cache": cache.pages, "slot_mapping": slot_mapping}
    factor = latent_factor(module)
    weight = norm_weight(module, "kv_a_layernorm")
    weight, eps = weight if factor == 1.0 else weight * factor, eps_of(module.kv_a_layernorm)
    if module.qk_rope_head_dim:
        rows, normalized = latent_rows(kv_a, weight, rotary, eps, **query_latent, **target)
    else:
        rows, normalized = _unrotated_rows(kv_a, weight, eps, **query_latent)
    if cache.is_quantized or not module.qk_rope_head_dim:
        cache.write(slot_mapping, rows)
    return rows, None if normalized is None else QueryLatent(q_a[0], normalized)


def _query_latent(module: Projections, hidden: torch.Tensor) -> QueryLatent | None:
    """The query's latent of a module without latents of its own."""
    if not has_query_latent(module):
        return None
    projected = module.q_a_proj(hidden)
    return QueryLatent(projected, module.q_a_layernorm(projected))


def read_rows(cache: LatentCache, slot_mapping: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tokens' rows [T, latent + rope], which an earlier layer has stored in the cache."""
    return kv_cache.read(cache.pages, slot_mapping, cache_format=cache.layout, scale=cache.scale, dtype=dtype)


def _unrotated_rows(
    kv_a: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    q_a: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    q_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``latent_rows`` of a model without rope dims; it stores nothing."""
    rows = functional.rms_norm(kv_a, weight.shape, weight, eps)
    if q_a is None or q_weight is None:
        return rows, None
    return rows, functional.rms_norm(q_a, q_weight.shape, q_weight, q_eps)


def _normalize_rope(module: Projections, rope: torch.Tensor) -> None:
    """Normalize keys' rope dims [T, rope] in place."""
    weight = norm_weight(module, "k_rope_only_layernorm")
    rope.copy_(functional.rms_norm(rope, weight.shape, weight, eps_of(key_rope_norm(module))))


def rotate_query(module: Projections, query: torch.Tensor, rotary: Rotary) -> None:
    """Rotate queries [T, h, nope + rope] in place."""
    if module.qk_rope_head_dim:
        rope = query[..., module.qk_nope_head_dim :]
        rotate_heads(rope, rotary, out=rope)


def _attend_chunks(
    module: Projections,
    kv_b: torch.Tensor,
    query: torch.Tensor,
    cache: LatentCache,
    selection: IndexSelection,
    chunks: Sequence[SelectionChunk],
    begin: int,
    rotary: Rotary,
    backend: str | None,
    out: torch.Tensor,
) -> None:
    """Sparse attention of the prefill part: queries [T, h, nope + rope] from ``begin`` on, into ``out`` [T, h, v]."""
    dtype = cache.query_dtype(query.dtype, reference=backend == "reference")
    for chunk in chunks:
        rows = chunk_rows(cache, chunk, dtype)
        for part in query_slices(begin + chunk.first, begin + chunk.last, query):
            indices = selection.rows(part.start, part.stop)
            attend = functools.partial(
                attend_selected_rows,
                cache=cache,
                rows=rows,
                indices=indices,
                softmax_scale=softmax_scale(module),
                backend=backend,
                sink=sinks(module),
            )
            rotation = rotary.part(part.start, part.stop)
            _attend_absorbed(module, kv_b, query[part], cache, rotation, backend, attend, out[part])


def _attend_absorbed(
    module: Projections,
    kv_b: torch.Tensor,
    query: torch.Tensor,
    cache: LatentCache,
    rotary: Rotary,
    backend: str | None,
    attend: Callable[[torch.Tensor], torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Attention of queries [T, h, nope + rope], into ``out`` [T, h, v]; ``attend`` computes it over latents."""
    tokens, heads = query.shape[:2]
    w_uk, w_uv = up_projections(kv_b, module.qk_nope_head_dim, module.v_head_dim)
    q_nope, q_rope = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=-1)
    folded = query.new_empty(tokens, heads, module.kv_lora_rank + module.qk_rope_head_dim)
    fold_query(q_nope, w_uk, out=folded[..., : module.kv_lora_rank])
    if module.qk_rope_head_dim:
        rotate_heads(q_rope, rotary, out=folded[..., module.kv_lora_rank :])
    folded = folded.to(cache.query_dtype(query.dtype, reference=backend == "reference"))
    unfold_value(attend(folded)[..., : module.kv_lora_rank].to(query.dtype), w_uv, out)
