"""Steps of a padded batch: where their tokens go, and how they attend."""

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
    gathers_rows,
    plan_chunks,
    selects_every_token,
)
from flashlatte.layers.selection import Selection, plan_selection

# Kernels take selected tokens by the tile.
_SELECTION_MULTIPLE = 64


@dataclass(frozen=True)
class Batch:
    """Whose tokens they are: pages and columns of the same requests."""

    table: PageTable
    columns: Columns


@dataclass(frozen=True)
class Step:
    """One forward pass over ``queries`` new columns.

    Attributes:
        slots: int64 [b, queries], where the new tokens go; −1 for hidden ones.
        stored: bool [b, queries], which new tokens are stored; None for all.
        lengths: int32 [b], tokens of each request once the step is done.
        metadata: of the flat batch that is the step; None where only a mask tells what a token sees.
        tokens: beside ``metadata``, int64 [T], which of the b · queries tokens the flat batch has; None for all.
    """

    queries: int
    slots: torch.Tensor
    stored: torch.Tensor | None
    lengths: torch.Tensor
    metadata: MLAMetadata | None
    tokens: torch.Tensor | None


@dataclass(frozen=True)
class FlatSteps:
    """Steps that a layer takes as a flat batch, without the mask.

    Attributes:
        cache_format: name of the rows' format.
        page_size: tokens in a page.
        indexer: of a model whose layers select tokens.
    """

    cache_format: str
    page_size: int
    indexer: IndexerConfig | None

    def decode_step(
        self, batch: Batch, queries: int, positions: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> MLAMetadata:
        """Every token of the padded batch, in absorbed form. What a hidden one attends to is of no interest."""
        every_slot = seen = None
        total, longest = positions.numel(), batch.columns.count + queries
        selection = self._selection(total, longest, positions.device)
        chosen = selection is not None and selection.slots is not None
        if selects_every_token(self.cache_format) and not chosen:
            width = -(-longest // _SELECTION_MULTIPLE) * _SELECTION_MULTIPLE
            position = torch.arange(width, device=lengths.device)
            every_slot = batch.table.slots(position.expand(batch.table.requests, -1))
            later = torch.arange(queries - 1, -1, -1, device=lengths.device)
            seen = (lengths[:, None] - later).clamp(min=0).to(torch.int32)
        part = DecodePart(queries, batch.table.block_table, lengths, every_slot=every_slot, seen=seen)
        return self._metadata_of(batch, total, total, longest, positions, slots, decode=part, selection=selection)

    def prefill_step(
        self,
        batch: Batch,
        queries: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        stored: torch.Tensor | None,
    ) -> tuple[MLAMetadata, torch.Tensor | None]:
        """The tokens that are not hidden, in multi-head form, and which they are; reads lengths from the device."""
        requests, device = batch.table.requests, positions.device
        tokens = None
        counts = [queries] * requests
        if stored is not None:
            tokens = stored.flatten().nonzero().flatten()
            counts = stored.sum(dim=1).tolist()
            positions, slots = positions.flatten()[tokens], slots.flatten()[tokens]
        starts = [*itertools.accumulate(counts, initial=0)]
        longest = batch.columns.count + queries
        selection = self._selection(starts[-1], longest, device)
        lengths = batch.table.lengths.tolist() if batch.columns.count > 0 else [0] * requests
        chunks = ()
        if selection is not None and selection.slots is not None:
            totals = [length + count for length, count in zip(lengths, counts, strict=True)]
            selection.chunks = plan_selection(
                counts, totals, positions.flatten(), batch.table.block_table, gathers=gathers_rows(self.cache_format)
            )
        elif batch.columns.count > 0:
            # A request without new tokens has nobody who looks at its history.
            contexts = [length if count else 0 for length, count in zip(lengths, counts, strict=True)]
            chunks = plan_chunks(counts, contexts, batch.table.block_table, WORKSPACE_TOKENS)
        part = PrefillPart(torch.tensor(starts, dtype=torch.int32, device=device), max(counts), chunks)
        metadata = self._metadata_of(batch, starts[-1], 0, longest, positions, slots, prefill=part, selection=selection)
        return metadata, tokens

    def _selection(self, tokens: int, longest: int, device: torch.device) -> Selection | None:
        """Room for a step's choice, if its model has an indexer; without slots if that would choose every token."""
        if self.indexer is None:
            return None
        topk, slots = self.indexer.topk, None
        if longest > topk:
            slots = torch.empty(tokens, topk, dtype=torch.int32, device=device)
        return Selection(topk, slots, None)

    def _metadata_of(
        self,
        batch: Batch,
        total: int,
        decoding: int,
        longest: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *,
        decode: DecodePart | None = None,
        prefill: PrefillPart | None = None,
        selection: Selection | None = None,
    ) -> MLAMetadata:
        return MLAMetadata(
            total,
            decoding,
            longest,
            self.page_size,
            batch.table.num_pages,
            positions.flatten(),
            slots.flatten(),
            decode=decode,
            prefill=prefill,
            selection=selection,
        )


def hidden_ones_lead(stored: torch.Tensor) -> bool:
    """Whether each row hides only tokens before its stored ones, of which there are; reads this from the device."""
    return bool(stored[:, -1:].all() & (stored[:, :-1] <= stored[:, 1:]).all())
