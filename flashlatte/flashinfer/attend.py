"""Decode over a table of pages by ``dense_decode``; over slots, also if a page is one token, by ``sparse_decode``."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.registry import plain_format
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.runtime import checks, value_checks


def by_token(page_size: int, cache_dtype: torch.dtype, q_dtype: torch.dtype) -> bool:
    """Whether ``attend`` runs ``sparse_decode``, whose Hopper kernel gathers single tokens.

    ``dense_decode``'s loads pages of 8·n, and ``sparse_decode`` has no caches with one scale.
    """
    return page_size == 1 and cache_dtype == q_dtype


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor | None,
    queries: int,
    *,
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    backend: str | None,
    q_rope: torch.Tensor | None = None,
    causal: bool = False,
    k_scale: float | None = None,
    selects: bool = False,
    attn_sink: torch.Tensor | None = None,
) -> None:
    """Attention of q [rows · queries, heads, d], written to ``out`` and, as a natural logarithm, to ``lse``.

    Args:
        q: packed queries, ``queries`` for each row of ``table``. Or their first columns, if the others are in
            ``q_rope``.
        cache: [pages, page_size, 1, d].
        table: [rows, max_pages]: pages, or slots if it ``selects``.
        lengths: [rows], keys of each row, or the number of slots it reads; None for all slots.
        out: [rows · queries, heads, head_dim_v].
        lse: float32 [rows · queries, heads], or None.
    """
    shape, head_dim_v = (table.shape[0], queries), out.shape[-1]
    q, out = q.unflatten(0, shape), out.unflatten(0, shape)
    q_rope = None if q_rope is None else q_rope.unflatten(0, shape)
    lse = None if lse is None else lse.unflatten(0, shape).transpose(1, 2)
    if value_checks.ENABLED and lengths is not None:
        # A causal mask makes lengths negative, and a request has more keys than it selects.
        lengths = lengths.clamp(0, table.shape[1] if selects else None)
    if not selects and not (queries == 1 and by_token(cache.shape[1], cache.dtype, q.dtype)):
        dense_decode(
            q,
            cache,
            table,
            checks.given("cache_seqlens", lengths),
            q_rope=q_rope,
            head_dim_v=head_dim_v,
            softmax_scale=softmax_scale,
            causal=causal,
            k_scale=k_scale,
            out=out,
            lse=lse,
            backend=backend,
        )
        return
    with checks.naming(indices="block_table", topk_length="cache_seqlens"):
        sparse_decode(
            q,
            cache,
            table.unsqueeze(1),
            q_rope=q_rope,
            cache_format=None if cache.dtype == torch.uint8 else plain_format(cache.dtype).name,
            topk_length=lengths,
            attn_sink=attn_sink,
            softmax_scale=softmax_scale,
            head_dim_v=head_dim_v,
            out=out,
            lse=lse,
            backend=backend,
        )
