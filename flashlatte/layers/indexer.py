"""The lightning indexer of DeepSeek-V3.2 (arXiv:2512.02556, §2.1), which selects the tokens that a query attends to."""

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
from flashlatte.layers.fused_projections import fused_linear, linear, plain_weight
from flashlatte.layers.metadata import DecodePart, MLAMetadata
from flashlatte.layers.parts import head_factors, part
from flashlatte.layers.selection import IndexSelection, SelectionChunk
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.index_quantize import index_gather, index_quantize
from flashlatte.ops.index_query import index_query
from flashlatte.ops.index_select import index_select, paged_index_select
from flashlatte.ops.index_weights import MAX_ROWS, index_weights
from flashlatte.ops.norm_rope import Rotary, rotate_heads
from flashlatte.runtime.side_stream import SideStream

# Steps with more tokens fill the GPU, and overlap does not help. 64 requests of 4,096 tokens gain a tenth of the step.
MAX_OVERLAPPED_TOKENS = 64


class IndexProjections(Protocol):
    """An indexer module of this package or of transformers (DeepseekV32, GlmMoeDsa).

    Mistral-Large-4's indexer projects queries from hidden states, which ``q_input_norm`` normalizes for ``wq_b``, and
    ``softmax_scaling`` scales the queries (``head_factors``).
    """

    wq_b: Any
    wk: Any
    k_norm: Any
    weights_proj: Any


class Indexer(nn.Module):
    """The projections of an indexer, with transformers' names. ``MLAAttention`` creates and runs it.

    Args:
        config: configuration of the indexer.
        hidden_size, q_lora_rank: widths of its inputs: keys and head weights are projected from hidden states, queries
            from the query's normalized latent.
        dtype, device: dtype and device of the parameters, which are not initialized. ``weights_proj`` is float32
            whatever the dtype, as in DeepSeek's code and transformers.
    """

    def __init__(
        self,
        config: IndexerConfig,
        hidden_size: int,
        q_lora_rank: int | None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if q_lora_rank is None:
            raise ValueError("q_lora_rank must be set in the config of a layer with an indexer, got None")
        self.config = config

        self.wq_b = linear(q_lora_rank, config.num_heads * config.head_dim, dtype, device)
        self.wk = linear(hidden_size, config.head_dim, dtype, device)
        self.k_norm = nn.LayerNorm(config.head_dim, config.norm_eps, dtype=dtype, device=device)
        self.weights_proj = linear(hidden_size, config.num_heads, torch.float32, device)
        self.requires_grad_(False)


@dataclass(frozen=True)
class StepIndexer:
    """An indexer bound to a step and to its layer's cache of index keys.

    Attributes:
        module: the projections.
        config: sizes, and how keys are transformed and rounded.
        pages: [pages, page_size, 1, width], index keys of the layer, with the block tables of its latents.
        layout: format of the index keys.
        rotary: rotation of the step's tokens in the indexer's layout.
        backend: backend of its operations; None selects one.
        positions: int [T], positions of the step's tokens, for a module with ``softmax_scaling``.
    """

    module: IndexProjections
    config: IndexerConfig
    pages: torch.Tensor
    layout: IndexFormat
    rotary: Rotary
    backend: str | None = None
    positions: torch.Tensor | None = None

    def store_keys(self, hidden: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the index keys of hidden states [T, hidden_size] in their slots."""
        keys, norm = self.module.wk(hidden), self.module.k_norm
        keys = self._rope_first(norm(keys.to(norm.weight.dtype)).to(keys.dtype))
        self._rotate(keys.unsqueeze(1))
        if self.config.hadamard:
            keys = keys @ hadamard(keys.shape[-1], keys.device, keys.dtype)
        rounding = self.config.scale_rounding
        index_quantize(self.pages, slot_mapping, keys, scale_rounding=rounding, backend=self.backend)

    def head_weights(self, hidden: torch.Tensor) -> torch.Tensor:
        """Head weights [T, H] of index queries, for hidden states [T, hidden_size]."""
        projection = self.module.weights_proj
        weight = plain_weight(projection)
        if weight is not None and weight.dtype == torch.float32 and hidden.shape[0] <= MAX_ROWS:
            return index_weights(hidden, weight, backend=self.backend)
        return fused_linear(hidden, projection)[0]

    def queries(self, q_input: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [T, H, head_dim] in the cache's query dtype, and scaled float32 head weights [T, H].

        Args:
            q_input: [T, q_lora_rank], the query's normalized latents; [T, hidden_size], hidden states, for a model
                without these latents.
            weights: [T, H], ``head_weights`` of the same tokens.
        """
        config = self.config
        norm, scaling = part(self.module, "q_input_norm"), part(self.module, "softmax_scaling")
        q = self.module.wq_b(q_input if norm is None else norm(q_input))
        q = self._rope_first(q.unflatten(-1, (-1, config.head_dim)))
        if scaling is not None and self.positions is not None:
            q = q * head_factors(scaling, self.positions, q.dtype)[..., None]
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

    def num_selecting(self, metadata: MLAMetadata, selection: IndexSelection) -> int:
        """Number of leading tokens of the step that select; the others attend to every token."""
        if selection.slots is None:
            return 0
        return metadata.num_decode_tokens if selection.chunks is None else metadata.num_tokens

    def select(
        self, q_input: torch.Tensor, weights: torch.Tensor, metadata: MLAMetadata, selection: IndexSelection
    ) -> None:
        """Fill ``selection`` for every token of the step, whose index keys must already be stored.

        Args:
            q_input: as for ``queries``.
            weights: [num_selecting, H], from ``head_weights``.
        """
        selection.is_filled = True
        tokens, decoding = weights.shape[0], metadata.num_decode_tokens
        if tokens == 0 or selection.slots is None:
            return
        q, weights = self.first(tokens).queries(q_input[:tokens], weights)
        if metadata.decode is not None and decoding:
            self._select_decode(q[:decoding], weights[:decoding], metadata.decode, selection)
        for chunk in selection.chunks or ():
            rows = slice(decoding + chunk.first, decoding + chunk.last)
            self._select_chunk(q[rows], weights[rows], chunk, selection, selection.slots[rows])

    def _select_decode(
        self, q: torch.Tensor, weights: torch.Tensor, part: DecodePart, selection: IndexSelection
    ) -> None:
        rows = selection.rows(0, q.shape[0])
        if part.pad_index is not None:
            q, weights = q[part.pad_index], weights[part.pad_index]
        q = q.unflatten(0, (-1, part.queries))
        if part.sharded is not None:
            limits = selection.topk, selection.logit_bytes
            selected = part.sharded.select(q, self.pages, weights, *limits, self.backend)
            rows.copy_(selected if part.unpad_index is None else selected[part.unpad_index])
            return
        selected = paged_index_select(
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
            rows.copy_(selected[part.unpad_index])

    def _select_chunk(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        chunk: SelectionChunk,
        selection: IndexSelection,
        slots: torch.Tensor,
    ) -> None:
        head_dim = self.config.head_dim
        if chunk.sharded is not None:
            keys, scales = chunk.sharded.index_keys(self.pages, head_dim, self.backend)
        else:
            keys, scales = index_gather(
                self.pages, chunk.block_table, chunk.cu_keys, chunk.num_keys, head_dim=head_dim, backend=self.backend
            )
        gathered, page_size = chunk.use_gathered_rows, self.pages.shape[1]
        selected = index_select(
            q,
            keys,
            weights,
            chunk.key_start,
            chunk.key_end,
            selection.topk,
            k_scale=scales,
            block_table=None if gathered else chunk.block_table,
            page_size=None if gathered else page_size,
            request_ids=None if gathered else chunk.request_ids,
            workspace_bytes=selection.logit_bytes,
            indices=None if gathered else slots,
            backend=self.backend,
        )
        if gathered:
            index_convert(
                selected,
                chunk.block_table,
                page_size,
                request_ids=chunk.request_ids,
                # Gathered rows are concatenated by request.
                workspace_ids=chunk.request_ids,
                workspace_starts=chunk.cu_keys,
                slots=slots,
                backend=self.backend,
            )

    def _rope_first(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., head_dim] with the rotated dims first. Scores do not depend on the order of dims, if queries and keys
        have the same one."""
        return x.roll(self.rotary.table.shape[1], dims=-1) if self.config.rope_last else x

    def _rotate(self, x: torch.Tensor) -> None:
        """Rotate the first dims of x [T, h, head_dim] in place."""
        if rope_dim := self.rotary.table.shape[1]:
            rope = x[..., :rope_dim]
            rotate_heads(rope, self.rotary, out=rope)

    def first(self, tokens: int) -> StepIndexer:
        """This indexer for the first ``tokens`` of the step."""
        positions = None if self.positions is None else self.positions[:tokens]
        return dataclasses.replace(self, rotary=self.rotary.part(0, tokens), positions=positions)


def make_step_indexer(
    module: IndexProjections,
    config: IndexerConfig,
    index_cache: torch.Tensor,
    pages: torch.Tensor,
    rotary: Rotary,
    backend: str | None,
    positions: torch.Tensor | None = None,
) -> StepIndexer:
    """Bind an indexer to a step whose latents are stored in ``pages``; ``backend`` is the layer's attention backend.

    Raises:
        TypeError, ValueError: an index cache that does not have the pages of the latents.
    """
    index_pages, layout = as_index_cache(index_cache, config.head_dim, "index_cache")
    if index_pages.shape[:2] != pages.shape[:2] or index_pages.device != pages.device:
        raise ValueError(
            f"index_cache must have cache's {pages.shape[0]} pages of {pages.shape[1]} tokens on {pages.device}, "
            f"got {index_pages.shape[0]} of {index_pages.shape[1]} on {index_pages.device}"
        )
    rotary = dataclasses.replace(rotary, interleaved=config.rope_layout == models.INTERLEAVED)
    # Not all of the indexer's operations have a "hopper" backend.
    index_backend = backend if backend in ("portable", "reference") else None
    if positions is None and part(module, "softmax_scaling") is not None:
        raise ValueError("positions must be given for an indexer whose queries are scaled by them, got None")
    return StepIndexer(module, config, index_pages, layout, rotary, index_backend, positions)


class OverlappedIndexer:
    """Stores index keys and selects tokens on a side stream, while the layer computes its absorbed queries.

    With few tokens, either chain of kernels leaves most of the GPU idle. A step of 8 requests of 2,048 tokens takes
    171 µs instead of 200 (H200).

    Args:
        indexer: the layer's indexer.
        hidden: [T, hidden_size], the step's hidden states.
        selection: the selection to fill; None if the step's selection is given.
    """

    def __init__(
        self, indexer: StepIndexer, hidden: torch.Tensor, metadata: MLAMetadata, selection: IndexSelection | None
    ) -> None:
        self._indexer, self._hidden = indexer, hidden
        self._metadata, self._selection = metadata, selection
        self._q_input = self._weights = None
        few = metadata.num_tokens <= MAX_OVERLAPPED_TOKENS and metadata.prefill is None
        # Collectives must stay in the order of one stream.
        self._side = SideStream(hidden.device, few and metadata.sharding is None)

    def start(self) -> None:
        """Launch what depends on the hidden states only."""
        self._side.run(self._store_keys)

    def select(self, q_input: torch.Tensor) -> None:
        """Select tokens, given the input of index queries (``StepIndexer.queries``)."""
        if self._selection is not None:
            # The side stream may read it until the step has ended.
            self._q_input = q_input
            self._side.run(self._select)

    def join(self) -> None:
        """Wait for the selection; call it before attention reads the selection."""
        self._side.join()

    def _store_keys(self) -> None:
        self._indexer.store_keys(self._hidden, self._metadata.slot_mapping)
        if self._selection is not None:
            selecting = self._indexer.num_selecting(self._metadata, self._selection)
            self._weights = self._indexer.head_weights(self._hidden[:selecting])

    def _select(self) -> None:
        if self._selection is not None and self._q_input is not None and self._weights is not None:
            self._indexer.select(self._q_input, self._weights, self._metadata, self._selection)
