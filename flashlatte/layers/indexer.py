"""The lightning indexer of DeepSeek-V3.2 (arXiv:2512.02556, §2.1): which tokens each query of a layer attends to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from flashlatte.kv_cache.hadamard import hadamard
from flashlatte.kv_cache.index_formats import IndexFormat, as_index_cache
from flashlatte.layers import models
from flashlatte.layers.config import IndexerConfig
from flashlatte.layers.metadata import DecodePart, MLAMetadata
from flashlatte.layers.products import linear
from flashlatte.layers.selection import Selection, SelectionChunk
from flashlatte.layers.side_by_side import plain_weight, products_of
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.index_quantize import index_gather, index_quantize
from flashlatte.ops.index_query import index_query
from flashlatte.ops.index_select import index_select, paged_index_select
from flashlatte.ops.index_weights import MAX_ROWS, index_weights
from flashlatte.ops.norm_rope import rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary

NORM_EPS = 1e-6


class IndexProjections(Protocol):
    """An indexer module: this package's, or one of transformers' (DeepseekV32, GlmMoeDsa)."""

    wq_b: Any
    wk: Any
    k_norm: Any
    weights_proj: Any


class Indexer(nn.Module):
    """The indexer's projections, under transformers' names. ``MLAAttention`` makes it, and what it computes.

    Args:
        config: of the indexer.
        hidden_size, q_lora_rank: of its layer: keys and head weights are projected from hidden states, queries from
            the query's normalised latent.
        dtype, device: of the parameters, which are not initialised. ``weights_proj`` is float32 whatever the dtype, as
            in DeepSeek's code and transformers.
    """

    def __init__(
        self,
        config: IndexerConfig,
        hidden_size: int,
        q_lora_rank: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config

        self.wq_b = linear(q_lora_rank, config.num_heads * config.head_dim, dtype, device)
        self.wk = linear(hidden_size, config.head_dim, dtype, device)
        self.k_norm = nn.LayerNorm(config.head_dim, NORM_EPS, dtype=dtype, device=device)
        self.weights_proj = linear(hidden_size, config.num_heads, torch.float32, device)
        self.requires_grad_(False)


@dataclass(frozen=True)
class Indexing:
    """An indexer in a step: what it is made of, and its layer's cache of index keys.

    Attributes:
        module: the projections.
        config: sizes, and how keys are transformed and rounded.
        pages: [pages, page_size, 1, width], index keys of the layer, by the same block tables as its latents.
        layout: their format.
        rotary: the rotation of the step's tokens in the indexer's layout.
        backend: of its operations; None chooses.
    """

    module: IndexProjections
    config: IndexerConfig
    pages: torch.Tensor
    layout: IndexFormat
    rotary: Rotary
    backend: str | None = None

    def store_keys(self, hidden: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Put the index keys of hidden states [T, hidden_size] into their slots."""
        keys = self.module.k_norm(self.module.wk(hidden))
        self._rotate(keys.unsqueeze(1))
        if self.config.hadamard:
            keys = keys @ hadamard(keys.shape[-1], keys.device, keys.dtype)
        rounding = self.config.scale_rounding
        index_quantize(self.pages, slot_mapping, keys, scale_rounding=rounding, backend=self.backend)

    def head_weights(self, hidden: torch.Tensor) -> torch.Tensor:
        """Weights [T, H] of the heads of index queries, of hidden states [T, hidden_size]."""
        projection = self.module.weights_proj
        weight = plain_weight(projection)
        if weight is not None and weight.dtype == torch.float32 and hidden.shape[0] <= MAX_ROWS:
            return index_weights(hidden, weight, backend=self.backend)
        return products_of(hidden, projection)[0]

    def queries(self, q_latent: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [T, H, head_dim] in the dtype that goes with the cache, and float32 head weights [T, H], of
        the queries' normalised latents [T, q_lora_rank] and their ``head_weights``.
        """
        config = self.config
        q = self.module.wq_b(q_latent).unflatten(-1, (-1, config.head_dim))
        if self.layout.scale_bytes:
            return index_query(
                q,
                weights,
                self.rotary.table,
                self.rotary.positions,
                interleaved=self.rotary.interleaved,
                hadamard=config.hadamard,
                scale_rounding=config.scale_rounding,
                backend=self.backend,
            )
        self._rotate(q)
        if config.hadamard:
            q = q @ hadamard(config.head_dim, q.device, q.dtype)
        return q.to(self.layout.record_dtype), weights.float() * (config.head_dim * config.num_heads) ** -0.5

    def num_choosing(self, metadata: MLAMetadata, selection: Selection) -> int:
        """How many of the step's tokens, from the first on, choose: the others attend to every token."""
        if selection.slots is None:
            return 0
        return metadata.num_decode_tokens if selection.chunks is None else metadata.num_tokens

    def select(
        self, q_latent: torch.Tensor, weights: torch.Tensor, metadata: MLAMetadata, selection: Selection
    ) -> None:
        """Choose for every token of the step, into ``selection``; the step's keys must be stored by then.

        Args:
            q_latent: [T, q_lora_rank], normalised.
            weights: [num_choosing, H], the ``head_weights``.
        """
        selection.made = True
        tokens, decoding = weights.shape[0], metadata.num_decode_tokens
        if tokens == 0 or selection.slots is None:
            return
        q, weights = self.first(tokens).queries(q_latent[:tokens], weights)
        if metadata.decode is not None and decoding:
            self._select_decode(q[:decoding], weights[:decoding], metadata.decode, selection)
        for chunk in selection.chunks or ():
            rows = slice(decoding + chunk.first, decoding + chunk.last)
            self._select_chunk(q[rows], weights[rows], chunk, selection, selection.slots[rows])

    def _select_decode(self, q: torch.Tensor, weights: torch.Tensor, part: DecodePart, selection: Selection) -> None:
        rows = selection.chosen(0, q.shape[0])
        if part.pad_index is not None:
            q, weights = q[part.pad_index], weights[part.pad_index]
        q = q.unflatten(0, (-1, part.queries))
        if part.over_ranks is not None:
            limits = selection.topk, selection.logit_bytes
            chosen = part.over_ranks.select(q, self.pages, weights, *limits, self.backend)
            rows.copy_(chosen if part.unpad_index is None else chosen[part.unpad_index])
            return
        chosen = paged_index_select(
            q,
            self.pages,
            weights,
            part.seq_lens,
            part.block_table,
            selection.topk,
            slots=True,
            workspace_bytes=selection.logit_bytes,
            indices=rows if part.unpad_index is None else None,
            backend=self.backend,
        )
        if part.unpad_index is not None:
            rows.copy_(chosen[part.unpad_index])

    def _select_chunk(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        chunk: SelectionChunk,
        selection: Selection,
        slots: torch.Tensor,
    ) -> None:
        head_dim = self.config.head_dim
        if chunk.over_ranks is not None:
            keys, scales = chunk.over_ranks.index_keys(self.pages, head_dim, self.backend)
        else:
            keys, scales = index_gather(
                self.pages, chunk.block_table, chunk.cu_keys, chunk.keys, head_dim=head_dim, backend=self.backend
            )
        positions = index_select(
            q,
            keys,
            weights,
            chunk.key_start,
            chunk.key_end,
            selection.topk,
            k_scale=scales,
            workspace_bytes=selection.logit_bytes,
            backend=self.backend,
        )
        index_convert(
            positions,
            chunk.block_table,
            self.pages.shape[1],
            request_ids=chunk.request_ids,
            # Rows that attention will gather lie request after request.
            workspace_ids=chunk.request_ids if chunk.gathers else None,
            workspace_starts=chunk.cu_keys if chunk.gathers else None,
            slots=slots,
            backend=self.backend,
        )

    def _rotate(self, x: torch.Tensor) -> None:
        """Rotate the first dims of x [T, h, head_dim] in place."""
        rope = x[..., : self.rotary.table.shape[1]]
        rotate_heads(rope, self.rotary, out=rope)

    def first(self, tokens: int) -> Indexing:
        """The same for the step's first tokens."""
        return dataclasses.replace(self, rotary=self.rotary.part(0, tokens))


def make_indexing(
    module: IndexProjections,
    config: IndexerConfig,
    index_cache: torch.Tensor,
    pages: torch.Tensor,
    rotary: Rotary,
    backend: str | None,
) -> Indexing:
    """An indexer for a step whose latents go into ``pages``; ``backend`` is that of the layer's attention.

    Raises:
        TypeError, ValueError: a cache of index keys that does not lie beside the latents.
    """
    index_pages, layout = as_index_cache(index_cache, config.head_dim, "index_cache")
    if index_pages.shape[:2] != pages.shape[:2] or index_pages.device != pages.device:
        raise ValueError(
            f"index_cache must have cache's {pages.shape[0]} pages of {pages.shape[1]} tokens on {pages.device}, "
            f"got {index_pages.shape[0]} of {index_pages.shape[1]} on {index_pages.device}"
        )
    turned = dataclasses.replace(rotary, interleaved=config.rope_layout == models.INTERLEAVED)
    # "hopper" is obeyed by attention; of the indexer's operations only some have it.
    shared = backend if backend in ("portable", "reference") else None
    return Indexing(module, config, index_pages, layout, turned, shared)
