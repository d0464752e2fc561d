"""Sparse prefill in absorbed form: many tokens of a request, each over the cached tokens that an indexer chose."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashlatte.layers.cache import LatentCache
from flashlatte.layers.decode import attend_selected
from flashlatte.layers.selection import SelectionChunk
from flashlatte.ops.cache_gather import cache_gather
from flashlatte.ops.sparse_prefill import sparse_prefill

# Of absorbed queries that exist at once: they are wider than those of a head (576 numbers beside 192).
QUERY_BYTES = 2**28


def query_parts(first: int, last: int, query: torch.Tensor) -> Iterator[slice]:
    """Tokens ``first`` to ``last`` - 1 in parts whose absorbed queries fit the workspace."""
    # A latent is 512 numbers, and a query in multi-head form 192: four times its bytes is a bound.
    each = 4 * query.shape[1] * query.shape[2] * query.element_size()
    count = max(QUERY_BYTES // each, 1)
    for begin in range(first, last, count):
        yield slice(begin, min(begin + count, last))


def chunk_rows(cache: LatentCache, chunk: SelectionChunk, dtype: torch.dtype) -> torch.Tensor | None:
    """Rows [n, 1, head_dim] that the chunk's choice points into: gathered ones, or the cache as it lies.

    None if neither can be had: then its slots are read one by one.
    """
    if chunk.over_ranks is not None:
        return chunk.over_ranks.latents(cache, dtype).unsqueeze(1)
    if chunk.gathers:
        rows = cache_gather(
            cache.pages,
            chunk.block_table,
            chunk.cu_keys,
            cache_format=cache.layout,
            scale=cache.scale,
            total_tokens=chunk.keys,
            dtype=dtype,
        )
        return rows.unsqueeze(1)
    if cache.layout.plain and cache.pages.dtype == dtype and cache.pages.is_contiguous():
        return cache.pages.flatten(0, 1)
    return None


def attend_chosen(
    query: torch.Tensor,
    cache: LatentCache,
    rows: torch.Tensor | None,
    chosen: torch.Tensor,
    softmax_scale: float,
    backend: str | None,
) -> torch.Tensor:
    """Attention of queries [T, h, head_dim] over the rows, or slots, that each chose (int32 [T, topk])."""
    if rows is None:
        return attend_selected(query, cache, chosen, softmax_scale, backend)
    out, _, _ = sparse_prefill(query, rows, chosen.unsqueeze(1), softmax_scale, d_v=cache.value_dim, backend=backend)
    return out
