"""The forward pass of an MLA layer, for any module with transformers' names of the projections."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

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
from flashlatte.layers.prefill import Expansion, attend_heads
from flashlatte.layers.selection import IndexSelection, SelectionChunk
from flashlatte.layers.weights import linear_weight, norm_weight
from flashlatte.ops.norm_rope import latent_rows, rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary


class Projections(Protocol):
    """An MLA module of this package or of transformers (DeepseekV2, DeepseekV3, Glm4MoeLite, …).

    It has either ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj``, or ``q_proj`` (if ``q_lora_rank`` is None); and
    ``kv_a_proj_with_mqa``, ``kv_a_layernorm``, ``kv_b_proj``, ``o_proj``. The projections may hold a subset of the
    layer's heads. LongCat-Flash's module also has ``mla_scale_q_lora`` and ``mla_scale_kv_lora``, the factors of
    queries and normalised latents.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scaling: float
    q_proj: Any
    q_a_proj: Any
    q_a_layernorm: Any
    q_b_proj: Any
    kv_a_proj_with_mqa: Any
    kv_a_layernorm: Any
    kv_b_proj: Any
    o_proj: Any


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
) -> torch.Tensor:
    """Store the latents of a flat batch [T, hidden_size] in the cache and compute its attention: [T, hidden_size].

    Args:
        rotary: rotation of the T tokens.
        indices: int [T, topk], the slots that each token attends to, all in absorbed form; None: the metadata's
            selection, or every token of its request up to its own.
        indexer: stores the index keys and fills the metadata's selection; None for a module that reuses another's
            selection, or attends to every token.
        query_factors: float32 [T], factors of each token's queries; None: none.
        backend: backend of the operations that read the cache.
        batch_invariant: passed to the decode operation.
    """
    # Both forms of attention need it. Raise for an unreadable weight before anything is stored.
    kv_b = linear_weight(module, "kv_b_proj", hidden.dtype)
    selection = metadata.selection
    overlapped = None
    if indexer is not None:
        overlapped = OverlappedIndexer(indexer, hidden, metadata, selection if indices is None else None)
        overlapped.start()
    rows, q_latent = store_latents(module, hidden, rotary, cache, metadata.slot_mapping)
    if overlapped is not None:
        overlapped.select(q_latent)
    query = project_query(module, hidden, q_latent, query_factors)
    tokens, heads = query.shape[:2]
    out = query.new_empty(tokens, heads, module.v_head_dim)
    absorbed = tokens if indices is not None else metadata.num_decode_tokens
    if absorbed:
        if indices is None and selection is not None and selection.slots is not None:
            indices = selection.slots[:absorbed]

        def attend(folded: torch.Tensor) -> torch.Tensor:
            if overlapped is not None:
                overlapped.join()
            return attend_pages(
                folded, cache, metadata.decode, indices, softmax_scale(module), backend, batch_invariant
            )

        rotation = rotary.part(0, absorbed)
        _attend_absorbed(module, kv_b, query[:absorbed], cache, rotation, backend, attend, out[:absorbed])
    if absorbed == tokens:
        return module.o_proj(out.flatten(1))
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
        attend_heads(query, rows[absorbed:], cache, metadata.prefill, expand, softmax_scale(module), out[absorbed:])
    return module.o_proj(out.flatten(1))


def hidden_projections(module: Projections) -> list[Any]:
    """The projections of hidden states, which ``fused_projections`` may compute as one product."""
    return ([] if module.q_lora_rank is None else [module.q_a_proj]) + [module.kv_a_proj_with_mqa]


def check_weights(module: Projections, dtype: torch.dtype) -> None:
    """Raise TypeError for a projection or norm whose weight cannot replace a call of the module, in ``dtype``."""
    linear_weight(module, "kv_b_proj", dtype)
    norm_weight(module, "kv_a_layernorm")
    if module.q_lora_rank is not None:
        norm_weight(module, "q_a_layernorm")


def project(
    module: Projections,
    hidden: torch.Tensor,
    rotary: Rotary,
    cache: LatentCache,
    slot_mapping: torch.Tensor,
    query_factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``project_query`` and ``store_latents``: queries, rows and the query's latent."""
    rows, q_latent = store_latents(module, hidden, rotary, cache, slot_mapping)
    return project_query(module, hidden, q_latent, query_factors), rows, q_latent


def store_latents(
    module: Projections, hidden: torch.Tensor, rotary: Rotary, cache: LatentCache, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Project the tokens' rows [T, latent + rope] and store them; also return the query's normalised latent [T, rank].

    The query's latent is None if the module projects queries directly.
    """
    query_latent: dict[str, Any] = {}
    *q_a, kv_a = fused_linear(hidden, *hidden_projections(module))
    if q_a:
        q_weight = norm_weight(module, "q_a_layernorm")
        query_latent = {"q_a": q_a[0], "q_weight": q_weight, "q_eps": _eps(module.q_a_layernorm)}
    # latent_rows also stores the rows in an unquantised cache. Other formats have their own write kernels.
    target: dict[str, Any] = {} if cache.is_quantised else {"cache": cache.pages, "slot_mapping": slot_mapping}
    factor = getattr(module, "mla_scale_kv_lora", 1.0)
    weight = norm_weight(module, "kv_a_layernorm")
    weight = weight if factor == 1.0 else weight * factor
    rows, q_latent = latent_rows(kv_a, weight, rotary, _eps(module.kv_a_layernorm), **query_latent, **target)
    if cache.is_quantised:
        cache.write(slot_mapping, rows)
    return rows, q_latent


def project_query(
    module: Projections,
    hidden: torch.Tensor,
    q_latent: torch.Tensor | None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Unrotated queries [T, h, nope + rope], times ``factors`` [T]."""
    query = module.q_proj(hidden) if q_latent is None else module.q_b_proj(q_latent)
    query = query.unflatten(-1, (-1, module.qk_nope_head_dim + module.qk_rope_head_dim))
    return query if factors is None else query * factors.to(query.dtype)[:, None, None]


def softmax_scale(module: Projections) -> float:
    """The softmax scale, including the factor of queries."""
    return module.scaling * getattr(module, "mla_scale_q_lora", 1.0)


def rotate_query(module: Projections, query: torch.Tensor, rotary: Rotary) -> None:
    """Rotate queries [T, h, nope + rope] in place."""
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
    rotate_heads(q_rope, rotary, out=folded[..., module.kv_lora_rank :])
    folded = folded.to(cache.query_dtype(query.dtype, reference=backend == "reference"))
    unfold_value(attend(folded)[..., : module.kv_lora_rank].to(query.dtype), w_uv, out)


def _eps(norm: Any) -> float:
    """The epsilon of an RMSNorm of PyTorch or of transformers."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
