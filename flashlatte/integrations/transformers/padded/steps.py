"""Steps of a padded batch, and their metadata as a flat batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from flashlatte.integrations.transformers.padded.columns import Columns
from flashlatte.integrations.transformers.padded.page_table import PageTable
from flashlatte.layers.builder import WORKSPACE_TOKENS
from flashlatte.layers.config import IndexerConfig
from flashlatte.layers.metadata import (
    DecodePart,
    MLAMetadata,
    PrefillPart,
    needs_gathered_rows,
    plan_chunks,
    uses_sparse_decode,
)
from flashlatte.layers.selection import IndexSelection, plan_selection

# Kernels process selected tokens in tiles of this size.
_SELECTION_MULTIPLE = 64


@dataclass(frozen=True)
class PaddedBatch:
    """The pages and columns of a batch of requests."""

    table: PageTable
    columns: Columns


@dataclass(frozen=True)
class PaddedStep:
    """One forward pass over ``queries`` new columns.

    Attributes:
        slots: int64 [b, queries], slots of the new tokens; −1 for hidden ones.
        stored: bool [b, queries], which new tokens are stored; None for all.
        lengths: int32 [b], tokens of each request after the step.
        metadata: metadata of the step as a flat batch; None if the step needs the mask.
        tokens: int64 [T], indices of the flat batch's tokens among the b · queries; None for all. Set with
            ``metadata``.
    """

    queries: int
    slots: torch.Tensor
    stored: torch.Tensor | None
    lengths: torch.Tensor
    metadata: MLAMetadata | None
    tokens: torch.Tensor | None


@dataclass(frozen=True)
class FlatSteps:
    """Builds the metadata of steps that need no mask.

    Attributes:
        cache_format: name of the rows' format.
        page_size: tokens in a page.
        indexer: the indexer's config; None for models without one.
    """

    cache_format: str
    page_size: int
    indexer: IndexerConfig | None

    def decode_step(
        self, batch: PaddedBatch, queries: int, positions: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> MLAMetadata:
        """A step of all tokens of the padded batch in absorbed form. Results of hidden tokens are not used."""
        all_slots = visible_lens = None
        total, max_length = positions.numel(), batch.columns.count + queries
        selection = self._selection(total, max_length, positions.device)
        selects = selection is not None and selection.slots is not None
        if uses_sparse_decode(self.cache_format) and not selects:
            width = -(-max_length // _SELECTION_MULTIPLE) * _SELECTION_MULTIPLE
            position = torch.arange(width, device=lengths.device)
            all_slots = batch.table.slots(position.expand(batch.table.requests, -1))
            later = torch.arange(queries - 1, -1, -1, device=lengths.device)
            visible_lens = (lengths[:, None] - later).clamp(min=0).to(torch.int32)
        part = DecodePart(queries, batch.table.block_table, lengths, all_slots=all_slots, visible_lens=visible_lens)
        return self._metadata_of(batch, total, total, max_length, positions, slots, decode=part, selection=selection)

    def prefill_step(
        self,
        batch: PaddedBatch,
        queries: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        stored: torch.Tensor | None,
    ) -> tuple[MLAMetadata, torch.Tensor | None]:
        """A step of the stored tokens in multi-head form, and their indices; reads lengths from the device."""
        requests, device = batch.table.requests, positions.device
        tokens = None
        counts = [queries] * requests
        if stored is not None:
            tokens = stored.flatten().nonzero().flatten()
            counts = stored.sum(dim=1).tolist()
            positions, slots = positions.flatten()[tokens], slots.flatten()[tokens]
        starts = [*itertools.accumulate(counts, initial=0)]
        max_length = batch.columns.count + queries
        selection = self._selection(starts[-1], max_length, device)
        lengths = batch.table.lengths.tolist() if batch.columns.count > 0 else [0] * requests
        chunks = ()
        if selection is not None and selection.slots is not None:
            totals = [length + count for length, count in zip(lengths, counts, strict=True)]
            selection.chunks = plan_selection(
                counts,
                totals,
                positions.flatten(),
                batch.table.block_table,
                use_gathered_rows=needs_gathered_rows(self.cache_format),
            )
        elif batch.columns.count > 0:
            # A request without new tokens has no queries for its history.
            contexts = [length if count else 0 for length, count in zip(lengths, counts, strict=True)]
            chunks = plan_chunks(counts, contexts, batch.table.block_table, WORKSPACE_TOKENS)
        part = PrefillPart(torch.tensor(starts, dtype=torch.int32, device=device), max(counts), chunks)
        metadata = self._metadata_of(
            batch, starts[-1], 0, max_length, positions, slots, prefill=part, selection=selection
        )
        return metadata, tokens

    def _selection(self, tokens: int, max_length: int, device: torch.device) -> IndexSelection | None:
        """Buffer of a step's selection if the model has an indexer; without slots if all tokens are selected."""
        if self.indexer is None:
            return None
        topk, slots = self.indexer.topk, None
        if max_length > topk:
            slots = torch.empty(tokens, topk, dtype=torch.int32, device=device)
        return IndexSelection(topk, slots, None)

    def _metadata_of(
        self,
        batch: PaddedBatch,
        total: int,
        decoding: int,
        max_length: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *,
        decode: DecodePart | None = None,
        prefill: PrefillPart | None = None,
        selection: IndexSelection | None = None,
    ) -> MLAMetadata:
        return MLAMetadata(
            total,
            decoding,
            max_length,
            self.page_size,
            batch.table.num_pages,
            positions.flatten(),
            slots.flatten(),
            decode=decode,
            prefill=prefill,
            selection=selection,
        )


def hidden_ones_lead(stored: torch.Tensor) -> bool:
    """Whether each row has stored tokens and hides only tokens before them; reads the result from the device."""
    return bool(stored[:, -1:].all() & (stored[:, :-1] <= stored[:, 1:]).all())
