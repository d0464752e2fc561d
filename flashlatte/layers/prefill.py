"""Prefill in multi-head form: causal attention of new tokens, merged with attention over chunks of cached tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashlatte.layers.absorbed import apply_sink
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.metadata import ContextChunk, PrefillPart
from flashlatte.ops.dense_prefill import dense_prefill
from flashlatte.ops.merge_states import merge_states


@dataclass(frozen=True)
class Expansion:
    """Expands cache rows to the keys and values of every head.

    Attributes:
        kv_b: kv_b_proj, from latents [n, latent] to [n, h · (nope + v)].
        latent_dim, nope_dim, rope_dim, v_dim: sizes of the layer.
    """

    kv_b: Callable[[torch.Tensor], torch.Tensor]
    latent_dim: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    def keys_and_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expand rows [n, latent + rope] to keys [n, h, nope + rope] and values [n, h, v]."""
        latent, rope = rows.split((self.latent_dim, self.rope_dim), dim=-1)
        per_head = self.kv_b(latent).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        tokens, heads = per_head.shape[:2]
        keys = per_head.new_empty(tokens, heads, self.nope_dim + self.rope_dim)
        keys[..., : self.nope_dim] = per_head[..., : self.nope_dim]
        keys[..., self.nope_dim :] = rope[:, None]
        return keys, per_head[..., self.nope_dim :]


def attend_heads(
    query: torch.Tensor,
    rows: torch.Tensor,
    cache: LatentCache,
    part: PrefillPart,
    expand: Expansion,
    softmax_scale: float,
    out: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> None:
    """Attention of the prefill part, into ``out`` [T, h, v].

    New tokens attend to each other causally, from ``rows``. Cached tokens of their requests are read in the chunks of
    ``part``, and each chunk's result is merged by lse. The split into chunks changes only the order of sums and the
    number of roundings of 16-bit results.

    Args:
        query: [T, h, nope + rope], rotated.
        rows: [T, latent + rope], unquantized rows of the new tokens.
        sink: float32 [h], a logit in the denominator of each head's softmax; None: none.
    """
    keys, values = expand.keys_and_values(rows)
    lengths = (part.cu_seqlens, part.cu_seqlens, part.max_queries, part.max_queries)
    _, lse = dense_prefill(query, keys, values, *lengths, softmax_scale=softmax_scale, causal=True, out=out)
    del keys, values
    for chunk in part.chunks:
        if chunk.first == chunk.last:
            continue
        tokens = slice(chunk.first, chunk.last)
        context, context_lse = _attend_chunk(query[tokens], cache, chunk, expand, softmax_scale, part.workspace)
        acc, acc_lse = out[tokens], lse[tokens]
        merge_states((acc, context), (acc_lse, context_lse), out=acc, lse=acc_lse)
    apply_sink(out, lse, sink)


def _attend_chunk(
    query: torch.Tensor,
    cache: LatentCache,
    chunk: ContextChunk,
    expand: Expansion,
    softmax_scale: float,
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = expand.keys_and_values(_cached_rows(cache, chunk, query.dtype, workspace))
    lengths = (chunk.cu_queries, chunk.cu_keys, chunk.max_queries, chunk.max_keys)
    return dense_prefill(query, keys, values, *lengths, softmax_scale=softmax_scale)


def _cached_rows(
    cache: LatentCache, chunk: ContextChunk, dtype: torch.dtype, workspace: torch.Tensor | None
) -> torch.Tensor:
    """Dequantized rows [tokens, latent + rope] of the chunk."""
    if chunk.sharded is not None:
        return chunk.sharded.latents(cache, dtype)
    out = workspace[: chunk.tokens] if workspace is not None and workspace.dtype == dtype else None
    return cache.gather(chunk.block_table, chunk.cu_keys, chunk.tokens, dtype, seq_starts=chunk.starts, out=out)
