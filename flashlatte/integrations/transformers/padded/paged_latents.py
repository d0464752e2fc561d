"""The latents of a padded batch in pages: one page table for all layers, one cache tensor for each layer.

A forward pass is a *step*: ``plan`` determines the slots of its tokens and the form of attention, the layers write and
attend, and ``commit`` adds the tokens to the history. A failed pass is not committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashlatte import kv_cache
from flashlatte.integrations.transformers.padded.columns import Columns
from flashlatte.integrations.transformers.padded.growing_pages import GrowingPages
from flashlatte.integrations.transformers.padded.page_table import PageTable
from flashlatte.integrations.transformers.padded.steps import FlatSteps, PaddedBatch, PaddedStep, hidden_ones_lead
from flashlatte.kv_cache import CacheFormat
from flashlatte.kv_cache.registry import format_of_rows
from flashlatte.layers.absorbed import MAX_ABSORBED_QUERIES
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.config import IndexerConfig
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.ops.cache_copy import copy_blocks
from flashlatte.ops.index_quantize import index_quantize
from flashlatte.ops.norm_rope import Rotary

Halves = tuple[torch.Tensor, torch.Tensor]


class PagedLatents:
    """Latent rows [latent | rope] of several layers in a paged cache of one format.

    Args:
        layout: format of the cache; its head_dim is latent_dim + rope_dim.
        latent_dim: kv_lora_rank, which is also the width of a value.
        page_size: tokens in a page.
        scale: the scale of format ``fp8``, None for others.
        backend: as in ``dense_decode``.
        indexer, index_layout: the indexer's config and the format of index keys; None for models without an indexer.
        layer_rows: latent_dim and rope_dim by layer, for the layers whose rows have other widths.

    Attributes:
        dtype: dtype of the most recently written rows.
    """

    def __init__(
        self,
        layout: CacheFormat,
        latent_dim: int,
        page_size: int,
        scale: float | None,
        backend: str | None,
        indexer: IndexerConfig | None = None,
        index_layout: CacheFormat | None = None,
        layer_rows: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self.layout = layout
        self.latent_dim = latent_dim
        self.page_size = page_size
        self.scale = scale
        self.backend = backend
        self._batch: PaddedBatch | None = None
        self._step: PaddedStep | None = None
        self.indexer = indexer
        self.layer_rows = dict(layer_rows or {})
        layouts = {layer: format_of_rows(layout.name, *widths) for layer, widths in self.layer_rows.items()}
        self._pages = GrowingPages(layout, page_size, layouts)
        self._index_pages = None if index_layout is None else GrowingPages(index_layout, page_size)
        self.dtype = torch.float32
        self._history_slots: torch.Tensor | None = None
        self._metadata: dict[torch.device, MLAMetadata] = {}
        self._rotary: list[tuple[Any, Rotary]] = []
        self._windows: dict[int, torch.Tensor] = {}
        self._column_states: dict[int, torch.Tensor] = {}

    def clear(self) -> None:
        """Remove all tokens and the batch."""
        self._batch = self._step = None
        for pages in self._all_pages():
            pages.clear()
        self._column_states = {}
        self._clear_step_caches()

    @property
    def columns(self) -> int:
        """Committed columns, stored or hidden."""
        return 0 if self._batch is None else self._batch.columns.count

    @property
    def requests(self) -> int:
        """Requests in the batch; 0 before the first step."""
        return 0 if self._batch is None else self._batch.table.requests

    @property
    def step(self) -> PaddedStep:
        """The planned step that is not committed yet."""
        if self._step is None:
            raise ValueError(
                "a paged cache must be used inside a forward pass of the whole model: an attention layer called "
                "directly has no attention mask"
            )
        return self._step

    def plan(
        self,
        requests: int,
        queries: int,
        device: torch.device,
        mask: torch.Tensor | None,
        *,
        opaque_mask: bool = False,
        causal: bool = True,
    ) -> None:
        """Plan a step of ``queries`` new columns for each of ``requests`` requests.

        Args:
            mask: [b, columns + queries], true for visible columns; None if all are.
            opaque_mask: the mask has another shape, and only multi-head attention can apply it.
            causal: whether a new token attends only to tokens up to itself.

        Raises:
            ValueError: a batch or device other than the history's, or a mask that shows tokens which were hidden in
                their own pass.
        """
        batch = self._batch_for(requests, device)
        table, columns = batch.table, batch.columns
        agrees, stored = columns.compare(mask, queries)
        table.reserve(columns.count + queries)
        if stored is None:
            positions = table.lengths[:, None] + torch.arange(queries, device=device)
            lengths = table.lengths + queries
        else:
            counts = stored.cumsum(dim=1, dtype=torch.int32)
            positions = torch.where(stored, table.lengths[:, None] + counts - 1, -1)
            lengths = table.lengths + counts[:, -1]
        self._clear_step_caches()
        # A causal step over the whole history can be a flat batch if hidden tokens come first: in stock attention,
        # hidden tokens after visible ones attend to them. All other steps need the mask.
        metadata = tokens = None
        slots = table.slots(positions, torch.int64)
        flat = FlatSteps(self.layout.name, self.page_size, self.indexer)
        if agrees and not opaque_mask:
            if columns.count > 0 and queries <= MAX_ABSORBED_QUERIES and (queries == 1 or (causal and stored is None)):
                metadata = flat.decode_step(batch, queries, positions, slots, lengths)
            elif causal and (stored is None or (columns.count == 0 and hidden_ones_lead(stored))):
                metadata, tokens = flat.prefill_step(batch, queries, positions, slots, stored)
        self._step = PaddedStep(queries, slots, stored, lengths, metadata, tokens)

    def metadata(self, device: torch.device) -> MLAMetadata | None:
        """The step's metadata on a layer's device."""
        metadata = self.step.metadata
        if metadata is None or metadata.positions.device == device:
            return metadata
        if device not in self._metadata:
            self._metadata[device] = metadata.to(device)
        return self._metadata[device]

    def rotary(
        self, embeddings: Any, cosines_and_sines: Callable[[Any], Halves], interleaved: bool, *, padded: bool = False
    ) -> Rotary:
        """The rotation of the step's flat batch, or of all tokens of the padded batch if ``padded``.

        Args:
            embeddings: position embeddings of the host model; all layers of a pass, or all of one type, receive the
                same object.
            cosines_and_sines: extracts cosines and sines from them, [b or 1, queries, rope / 2] each.
        """
        for known, rotary in self._rotary:
            if known is embeddings:
                return rotary
        both = torch.cat(cosines_and_sines(embeddings), dim=-1).float()
        table = both.expand(self.requests, -1, -1).flatten(0, 1)
        tokens = None if padded else self.step.tokens
        rows = torch.arange(table.shape[0], device=table.device) if tokens is None else tokens.to(table.device)
        self._rotary.append((embeddings, Rotary(table, rows, interleaved)))
        return self._rotary[-1][1]

    def window_slots(self, width: int, device: torch.device) -> torch.Tensor:
        """Slots of a token's own column and the ``width`` - 1 before it, for the step's flat batch: int32 [T, width].

        -1 for hidden columns, and before the first. transformers also counts hidden columns.
        """
        if width not in self._windows:
            windows = torch.nn.functional.pad(self._slots_of_columns(), (width - 1, 0), value=-1).unfold(1, width, 1)
            flat = windows[:, self.columns :].to(torch.int32).flatten(0, 1).contiguous()
            self._windows[width] = flat if self.step.tokens is None else flat[self.step.tokens]
        return self._windows[width].to(device)

    def slots_of(self, columns: torch.Tensor) -> torch.Tensor:
        """Slots of columns (int [b, s, n], -1 for none) that the step's tokens select: int32 [T, n] of the flat batch.

        -1 for hidden columns, and for repetitions, which kernels would attend to twice.
        """
        every = self._slots_of_columns().to(columns.device)
        slots = every.gather(1, columns.clamp(min=0).flatten(1).long()).view(columns.shape)
        slots = torch.where(columns < 0, -1, slots).flatten(0, 1).to(torch.int32)
        if self.step.stored is not None or self._current_batch().columns.has_hidden:
            # The stock indexer selects a column twice only if some columns are hidden.
            slots = slots.sort(dim=-1).values
            repeated = torch.nn.functional.pad(slots[:, 1:] == slots[:, :-1], (1, 0), value=False)
            slots = slots.masked_fill(repeated, -1)
        return slots if self.step.tokens is None else slots[self.step.tokens.to(slots.device)]

    def append_column_states(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Append states of the step's columns [b, queries, width]; returns those of all columns."""
        if self.columns:
            states = torch.cat((self.column_states(layer), states), dim=1)
        self._column_states[layer] = states
        return states

    def column_states(self, layer: int) -> torch.Tensor:
        """A layer's states of all committed columns [b, columns, width]."""
        return self._column_states[layer][:, : self.columns]

    def holds_column_states(self, layer: int) -> bool:
        """Whether this layer has states of columns."""
        return self.columns > 0 and layer in self._column_states

    def cache(self, layer: int, device: torch.device, dtype: torch.dtype) -> LatentCache:
        """The layer's cache, for a step of rows in ``dtype``."""
        self.dtype = dtype
        return LatentCache(self.pages(layer, device), self._pages.layout_of(layer), self.widths(layer)[0], self.scale)

    def widths(self, layer: int) -> tuple[int, int]:
        """The widths of the latent and rope parts of a layer's rows."""
        return self.layer_rows.get(layer, (self.latent_dim, self.layout.head_dim - self.latent_dim))

    def pages(self, layer: int, device: torch.device) -> torch.Tensor:
        """The layer's cache tensor, grown to the page table's number of pages."""
        return self._pages.of(layer, device, self._current_batch().table.num_pages)

    def index_pages(self, layer: int, device: torch.device) -> torch.Tensor:
        """The layer's index keys, grown to the page table's number of pages."""
        return self._require_index_pages().of(layer, device, self._current_batch().table.num_pages)

    def write_index_keys(self, layer: int, keys: torch.Tensor) -> None:
        """Store the step's index keys [b, queries, head_dim], rotated."""
        pages, slots = self.index_pages(layer, keys.device), self.step.slots.flatten().to(keys.device)
        assert self.indexer is not None
        index_quantize(pages, slots, keys.flatten(0, 1), scale_rounding=self.indexer.scale_rounding)

    def read_history(self, layer: int) -> torch.Tensor:
        """A layer's rows of all committed columns, [b, columns, head_dim] of ``dtype``; zeros for hidden tokens."""
        return self._read_history(self._pages, layer, self.scale, self.dtype)

    def read_index_history(self, layer: int) -> torch.Tensor:
        """A layer's index keys of all committed columns, float32 [b, columns, head_dim]; zeros for hidden tokens."""
        return self._read_history(self._require_index_pages(), layer, None, torch.float32)

    def _read_history(self, pages: GrowingPages, layer: int, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
        cache = pages[layer]
        slots = self._slots_of_history().to(cache.device)
        return kv_cache.read(cache, slots, cache_format=pages.layout_of(layer), scale=scale, dtype=dtype)

    def _slots_of_columns(self) -> torch.Tensor:
        """Slots of all columns and those of the step, int64 [b, columns + queries]; -1 for hidden ones."""
        return torch.cat((self._slots_of_history(), self.step.slots), dim=1) if self.columns else self.step.slots

    def _slots_of_history(self) -> torch.Tensor:
        """Slots of all committed columns, int64 [b, columns]; -1 for hidden ones."""
        if self._history_slots is None:
            batch = self._current_batch()
            self._history_slots = batch.table.slots(batch.columns.positions(), torch.int64)
        return self._history_slots

    def holds(self, layer: int) -> bool:
        """Whether this layer has a history."""
        return self.columns > 0 and layer in self._pages

    def holds_index_keys(self, layer: int) -> bool:
        """Whether this layer has a history of index keys."""
        return self.columns > 0 and self._index_pages is not None and layer in self._index_pages

    def commit(self) -> None:
        """Add the step's tokens to the history."""
        step, batch = self.step, self._current_batch()
        batch.columns.append(step.queries, step.stored)
        batch.table.lengths = step.lengths
        self._step = None
        self._clear_step_caches()

    def drop_columns(self, count: int) -> None:
        """Remove the last ``count`` columns, or all if there are fewer."""
        count = min(count, self.columns)
        if count == 0:
            return
        batch = self._current_batch()
        self._clear_step_caches()
        self._copy_pages(*batch.table.shorten(batch.table.lengths - batch.columns.drop(count)))

    def select(self, requests: torch.Tensor) -> None:
        """Replace the batch by requests of it, given by index (int [n], repeats allowed)."""
        if self._batch is None:
            return
        requests = requests.to(self._batch.table.device)
        self._clear_step_caches()
        self._batch.columns.select(requests)
        for layer, states in self._column_states.items():
            self._column_states[layer] = states.index_select(0, requests.to(states.device))
        self._copy_pages(*self._batch.table.select(requests))

    def _batch_for(self, requests: int, device: torch.device) -> PaddedBatch:
        if self._batch is None:
            self._batch = PaddedBatch(PageTable(requests, self.page_size, device), Columns(requests, device))
        table = self._batch.table
        if table.requests != requests:
            raise ValueError(
                f"input must have the cache's {table.requests} requests, got {requests}: "
                "batch_repeat_interleave and batch_select_indices change the batch of a cache"
            )
        if table.device != device:
            raise ValueError(
                f"input must be on the cache's device {table.device}, got {device}: use a new cache after moving the "
                "model"
            )
        return self._batch

    def _copy_pages(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        num_pages = self._current_batch().table.num_pages
        grown = [tensor for pages in self._all_pages() for tensor in pages.grown(num_pages)]
        copy_blocks(grown, source.tolist(), destination.tolist())

    def _all_pages(self) -> list[GrowingPages]:
        return [self._pages] if self._index_pages is None else [self._pages, self._index_pages]

    def _require_index_pages(self) -> GrowingPages:
        if self._index_pages is None:
            raise ValueError("this cache has no index keys: it was created for a model without an indexer")
        return self._index_pages

    def _clear_step_caches(self) -> None:
        self._history_slots = None
        self._metadata = {}
        self._rotary, self._windows = [], {}

    def _current_batch(self) -> PaddedBatch:
        if self._batch is None:
            raise ValueError("the cache is empty")
        return self._batch
