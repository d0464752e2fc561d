"""Index logits: the arguments, and the specification in plain PyTorch.

logits[i, j] = k_scale[j] · Σ_h weights[i, h] · relu(q[i, h] · k[j])
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kv_cache import fp4
from flashlatte.kv_cache.index_formats import as_index_cache

# Rows per step, since [rows, H, N] products are held in memory.
PRODUCTS = 2**26


class IndexLogitsParams(NamedTuple):
    """The checked arguments of ``api.index_logits``; ``compressed``: column 0 of a row is its first key."""

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor | None
    weights: torch.Tensor
    key_start: torch.Tensor
    key_end: torch.Tensor
    logits: torch.Tensor
    clean: bool
    compressed: bool


class PagedIndexLogitsParams(NamedTuple):
    """The checked arguments of ``api.paged_index_logits``."""

    q: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor
    logits: torch.Tensor
    clean: bool


class SparseIndexLogitsParams(NamedTuple):
    """The checked arguments of ``sparse.sparse_index_logits``; ``k`` is contiguous, or a cache of four axes."""

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor | None
    weights: torch.Tensor
    first_key: torch.Tensor
    num_keys: torch.Tensor
    block_size: int
    logits: torch.Tensor


def ragged(params: IndexLogitsParams) -> None:
    q, weights, logits = params.q, params.weights, params.logits
    keys = _dequantized(params.k, params.k_scale)
    columns = torch.arange(logits.shape[1], device=q.device)
    rows_at_a_time = max(1, PRODUCTS // (q.shape[1] * keys.shape[0]))
    for begin in range(0, q.shape[0], rows_at_a_time):
        rows = slice(begin, begin + rows_at_a_time)
        limits = params.key_start[rows], params.key_end[rows]
        start, end = (limit.long().clamp(0, keys.shape[0]).unsqueeze(1) for limit in limits)
        scores = _scores(q[rows], keys, weights[rows])
        position = columns + start if params.compressed else columns.expand(scores.shape[0], -1)
        inside = (position >= start) & (position < end)
        scores = scores.gather(1, position.clamp(max=keys.shape[0] - 1))
        _store(logits[rows], scores, inside, params.clean)


def paged(params: PagedIndexLogitsParams) -> None:
    q, cache, weights, logits = params.q, params.cache, params.weights, params.logits
    block_table, cache_seqlens, clean = params.block_table, params.cache_seqlens, params.clean
    batch, next_n, _, head_dim = q.shape
    cache, layout = as_index_cache(cache, head_dim)
    num_pages, page_size = cache.shape[:2]
    position = torch.arange(min(logits.shape[1], block_table.shape[1] * page_size), device=q.device)
    page = block_table.long()[:, position // page_size]
    in_cache = (page >= 0) & (page < num_pages)
    views = layout.page_views(cache)
    for request in range(batch):
        pages = page[request].where(in_cache[request], 0)
        keys = layout.decode(tuple(view[pages, position % page_size] for view in views), 1.0)
        keys = keys.where(in_cache[request].unsqueeze(1), 0.0)
        if cache_seqlens.dim() == 1:
            length = cache_seqlens[request].long().clamp_min(0)  # no difference wraps round
            limits = length - next_n + 1 + torch.arange(next_n, device=q.device)
        else:
            limits = cache_seqlens[request].long()
        rows = slice(request * next_n, (request + 1) * next_n)
        scores = _scores(q[request], keys, weights[rows])
        inside = position < limits.unsqueeze(1)
        target = logits[rows]
        _store(target[:, : len(position)], scores, inside, clean)
        if clean:
            target[:, len(position) :] = -torch.inf


def sparse(params: SparseIndexLogitsParams) -> None:
    q, k, weights, logits = params.q, params.k, params.weights, params.logits
    first_key, num_keys, block_size = params.first_key, params.num_keys, params.block_size
    heads, head_dim = q.shape[1:]
    if k.dim() == 4:
        cache, layout = as_index_cache(k, head_dim)
        views, page_size = layout.page_views(cache), cache.shape[1]
        total = cache.shape[0] * page_size
    else:
        keys, total = _dequantized(k, params.k_scale), k.shape[0]
    offset = torch.arange(block_size, device=q.device)
    rows_at_a_time = max(1, PRODUCTS // (logits.shape[1] * max(heads, head_dim)))
    for begin in range(0, q.shape[0], rows_at_a_time):
        rows = slice(begin, begin + rows_at_a_time)
        # [rows, S · block_size]
        position = (first_key[rows].long().unsqueeze(2) + offset).flatten(1)
        inside = (offset < num_keys[rows].unsqueeze(2)).flatten(1) & (position >= 0) & (position < total)
        position = position.where(inside, 0)
        if k.dim() == 4:
            chosen = layout.decode(tuple(view[position // page_size, position % page_size] for view in views), 1.0)
        else:
            chosen = keys[position]
        products = torch.einsum("mhd,mnd->mhn", q[rows].float(), chosen).relu_()
        _store(logits[rows], torch.einsum("mh,mhn->mn", weights[rows], products), inside, True)


def _dequantized(k: torch.Tensor, k_scale: torch.Tensor | None) -> torch.Tensor:
    """float32 [N, head_dim]."""
    if k.dtype == torch.uint8 and k_scale is not None:
        return fp4.dequantize_mxfp4(k, k_scale)
    return k.float() if k_scale is None else k.float() * k_scale.unsqueeze(1)


def _scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float32 [rows, N]. Scales are above 0, so they can be applied inside the relu."""
    products = torch.einsum("mhd,nd->mhn", q.float(), keys).relu_()
    return torch.einsum("mh,mhn->mn", weights, products)


def _store(logits: torch.Tensor, scores: torch.Tensor, inside: torch.Tensor, clean: bool) -> None:
    outside = torch.full_like(logits, -torch.inf) if clean else logits
    logits.copy_(torch.where(inside, scores.to(logits.dtype), outside))
