"""The forward pass of an MLA layer, for whatever module has the projections under transformers' names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from flashlatte.layers.absorbed import fold_query, unfold_value, up_projections
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.chosen import attend_chosen, chunk_rows, query_parts
from flashlatte.layers.decode import attend_pages
from flashlatte.layers.index_step import IndexStep
from flashlatte.layers.indexer import Indexing
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.layers.prefill import Expansion, attend_heads
from flashlatte.layers.selection import Selection, SelectionChunk
from flashlatte.layers.side_by_side import products_of
from flashlatte.layers.weights import own_matrix, own_weight
from flashlatte.ops.norm_rope import latent_rows, rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary


class Projections(Protocol):
    """An MLA module: this package's, or one of transformers' (DeepseekV2, DeepseekV3, Glm4MoeLite, …).

    Either ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj``, or ``q_proj`` (if ``q_lora_rank`` is None); and
    ``kv_a_proj_with_mqa``, ``kv_a_layernorm``, ``kv_b_proj``, ``o_proj``. The heads are those that the projections
    have, which may be a part of the layer's. LongCat-Flash's has ``mla_scale_q_lora`` and ``mla_scale_kv_lora``
    besides, by which queries and normalised latents are multiplied.
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
    indexing: Indexing | None = None,
    query_factors: torch.Tensor | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Attention of a flat batch [T, hidden_size], written to the cache on the way: [T, hidden_size].

    Args:
        rotary: the rotation of the T tokens.
        indices: int [T, topk], the slots that each token attends to, all in absorbed form; None: what the metadata's
            selection says, or every token of its request up to its own.
        indexing: the module's indexer, which stores its keys and makes that selection; None for a module that shares
            another's, or attends to every token.
        query_factors: float32 [T], what each token's queries are multiplied by; None: nothing.
        backend: of the operations that read the cache.
        batch_invariant: of the operation that decodes.
    """
    # Both forms of attention need it; a weight that cannot be read is refused before anything is stored.
    kv_b = own_matrix(module, "kv_b_proj", hidden.dtype)
    selection = metadata.selection
    indexer = None
    if indexing is not None:
        indexer = IndexStep(indexing, hidden, metadata, selection if indices is None else None)
        indexer.start()
    rows, q_latent = store_latents(module, hidden, rotary, cache, metadata.slot_mapping)
    if indexer is not None:
        indexer.select(q_latent)
    query = project_query(module, hidden, q_latent, query_factors)
    tokens, heads = query.shape[:2]
    out = query.new_empty(tokens, heads, module.v_head_dim)
    absorbed = tokens if indices is not None else metadata.num_decode_tokens
    if absorbed:
        if indices is None and selection is not None and selection.slots is not None:
            indices = selection.slots[:absorbed]

        def attend(folded: torch.Tensor) -> torch.Tensor:
            if indexer is not None:
                indexer.join()
            return attend_pages(
                folded, cache, metadata.decode, indices, softmax_scale(module), backend, batch_invariant
            )

        of_decode = rotary.part(0, absorbed)
        _attend_absorbed(module, kv_b, query[:absorbed], cache, of_decode, backend, attend, out[:absorbed])
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
    """What is made of hidden states in one product if it can be (``side_by_side``)."""
    return ([] if module.q_lora_rank is None else [module.q_a_proj]) + [module.kv_a_proj_with_mqa]


def check_weights(module: Projections, dtype: torch.dtype) -> None:
    """Raise TypeError for a projection or norm whose weight cannot be read in place of a call, in ``dtype``."""
    own_matrix(module, "kv_b_proj", dtype)
    own_weight(module, "kv_a_layernorm")
    if module.q_lora_rank is not None:
        own_weight(module, "q_a_layernorm")


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
    """The tokens' rows [T, latent + rope], in the cache by then, and the query's normalised latent [T, rank], if it has
    one.
    """
    query_latent: dict[str, Any] = {}
    *of_query, kv_a = products_of(hidden, *hidden_projections(module))
    if of_query:
        q_weight = own_weight(module, "q_a_layernorm")
        query_latent = {"q_a": of_query[0], "q_weight": q_weight, "q_eps": _eps(module.q_a_layernorm)}
    # A cache that is not quantised takes the rows in passing; the others have kernels of their own.
    target: dict[str, Any] = {} if cache.is_quantised else {"cache": cache.pages, "slot_mapping": slot_mapping}
    factor = getattr(module, "mla_scale_kv_lora", 1.0)
    weight = own_weight(module, "kv_a_layernorm")
    weight = weight if factor == 1.0 else weight * factor
    rows, q_a = latent_rows(kv_a, weight, rotary, _eps(module.kv_a_layernorm), **query_latent, **target)
    if cache.is_quantised:
        cache.write(slot_mapping, rows)
    return rows, q_a


def project_query(
    module: Projections,
    hidden: torch.Tensor,
    q_latent: torch.Tensor | None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries [T, h, nope + rope], not rotated yet, times ``factors`` [T]."""
    query = module.q_proj(hidden) if q_latent is None else module.q_b_proj(q_latent)
    query = query.unflatten(-1, (-1, module.qk_nope_head_dim + module.qk_rope_head_dim))
    return query if factors is None else query * factors.to(query.dtype)[:, None, None]


def softmax_scale(module: Projections) -> float:
    """What scores are multiplied by: a factor of the queries can as well be one of the scores."""
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
    selection: Selection,
    chunks: Sequence[SelectionChunk],
    begin: int,
    rotary: Rotary,
    backend: str | None,
    out: torch.Tensor,
) -> None:
    """Sparse attention of the prefill part, queries [T, h, nope + rope] from ``begin`` on, into ``out`` [T, h, v]."""
    dtype = cache.query_dtype(query.dtype, reference=backend == "reference")
    for chunk in chunks:
        rows = chunk_rows(cache, chunk, dtype)
        for part in query_parts(begin + chunk.first, begin + chunk.last, query):
            chosen = selection.chosen(part.start, part.stop)
            attend = functools.partial(
                attend_chosen,
                cache=cache,
                rows=rows,
                chosen=chosen,
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
    """Attention of queries [T, h, nope + rope], into ``out`` [T, h, v]; ``attend`` is that over latents."""
    tokens, heads = query.shape[:2]
    w_uk, w_uv = up_projections(kv_b, module.qk_nope_head_dim, module.v_head_dim)
    q_nope, q_rope = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=-1)
    folded = query.new_empty(tokens, heads, module.kv_lora_rank + module.qk_rope_head_dim)
    fold_query(q_nope, w_uk, out=folded[..., : module.kv_lora_rank])
    rotate_heads(q_rope, rotary, out=folded[..., module.kv_lora_rank :])
    folded = folded.to(cache.query_dtype(query.dtype, reference=backend == "reference"))
    unfold_value(attend(folded)[..., : module.kv_lora_rank].to(query.dtype), w_uv, out)


def _eps(norm: Any) -> float:
    """Of an RMSNorm of PyTorch or of transformers."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
