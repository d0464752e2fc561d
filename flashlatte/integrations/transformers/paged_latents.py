"""The latents of a batch of requests in pages: one table for all layers, one cache tensor a layer.

A forward pass is a *step*: ``plan`` settles where its tokens go and which form its attention takes, the layers
``write`` and ``attend``, and ``commit`` makes the tokens part of the history. A pass that fails is not committed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte import kv_cache
from flashlatte.integrations.transformers.columns import Columns
from flashlatte.integrations.transformers.page_table import PageTable
from flashlatte.kv_cache import CacheFormat
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.sparse_decode import sparse_decode

# Longer steps are prefill: the decode kernels are made for few queries, and over a history the multi-head form is
# the cheaper one from kv_lora_rank * (nope + v) / (2 * kv_lora_rank - nope - v) = 170 queries on (DeepSeek-V3).
MAX_ABSORBED_QUERIES = 16

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
        absorbed: attend in absorbed form over the pages; otherwise in multi-head form over ``read_history``.
        slots: int64 [b, queries], where the new tokens go; −1 for hidden ones.
        stored: bool [b, queries], which new tokens are stored; None for all.
        lengths: int32 [b], tokens of each request once the step is done.
    """

    queries: int
    absorbed: bool
    slots: torch.Tensor
    stored: torch.Tensor | None
    lengths: torch.Tensor


class PagedLatents:
    """Latent rows [latent | rope] of several layers in a paged cache of one format.

    Args:
        layout: format of the cache; its head_dim is latent_dim + rope_dim.
        latent_dim: kv_lora_rank, which is also the width of a value.
        page_size: tokens in a page.
        scale: the scale of format ``fp8``, None for others.
        backend: as in ``dense_decode``.
    """

    def __init__(
        self, layout: CacheFormat, latent_dim: int, page_size: int, scale: float | None, backend: str | None
    ) -> None:
        self.layout = layout
        self.latent_dim = latent_dim
        self.page_size = page_size
        self.scale = scale
        self.backend = backend
        self._batch: Batch | None = None
        self._step: Step | None = None
        self._pages: dict[int, torch.Tensor] = {}
        self._dtype = torch.float32
        self._history_slots: torch.Tensor | None = None
        self._selection: torch.Tensor | None = None

    def clear(self) -> None:
        """Forget all tokens, and the batch with them."""
        self._batch = self._step = None
        self._pages = {}
        self._forget_slots()

    @property
    def columns(self) -> int:
        """Committed columns, stored or hidden."""
        return 0 if self._batch is None else self._batch.columns.count

    @property
    def requests(self) -> int:
        """Requests in the batch; 0 before the first step."""
        return 0 if self._batch is None else self._batch.table.requests

    @property
    def absorbs(self) -> bool:
        """Whether the step attends in absorbed form."""
        return self._current_step().absorbed

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
        """Settle a step of ``queries`` new columns for each of ``requests`` requests.

        Args:
            mask: [b, columns + queries], true where a column may be seen; None if all may.
            opaque_mask: the mask is of another shape, which only multi-head attention can apply.
            causal: whether a new token sees only those before it.

        Raises:
            ValueError: a batch or device other than the history's, or a mask that asks for tokens that were hidden
                when they came.
        """
        batch = self._batch_for(requests, device)
        table, columns = batch.table, batch.columns
        agrees, stored = columns.compare(mask, queries)
        table.reserve(columns.count + queries)
        if stored is None:
            positions = table.lengths[:, None] + torch.arange(queries, device=device)
            lengths = table.lengths + queries
        else:
            seen = stored.cumsum(dim=1, dtype=torch.int32)
            positions = torch.where(stored, table.lengths[:, None] + seen - 1, -1)
            lengths = table.lengths + seen[:, -1]
        absorbed = columns.count > 0 and agrees and not opaque_mask and queries <= MAX_ABSORBED_QUERIES
        if queries > 1:
            absorbed = absorbed and causal and stored is None
        self._forget_slots()
        self._step = Step(queries, absorbed, table.slots(positions, torch.int64), stored, lengths)

    def write(self, layer: int, rows: torch.Tensor) -> None:
        """Store the step's rows [b, queries, head_dim]."""
        step = self._current_step()
        self._dtype = rows.dtype
        kv_cache.write(
            self._pages_of(layer, rows.device),
            step.slots.flatten().to(rows.device),
            rows.flatten(0, 1),
            cache_format=self.layout,
            scale=self.scale,
        )

    def attend(self, layer: int, q: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """Absorbed attention of queries [b, queries, h, head_dim] over stored tokens: [b, queries, h, latent_dim].

        The step's own rows must have been written.
        """
        step, table = self._current_step(), self._current_batch().table
        pages = self._pages_of(layer, q.device)
        query = q.to(self._query_dtype(q))
        if self.layout.fixed_split:
            out, _ = sparse_decode(
                query,
                pages,
                self._all_tokens().to(q.device),
                cache_format=self.layout,
                softmax_scale=softmax_scale,
                backend=self.backend,
            )
        else:
            out, _ = dense_decode(
                query,
                pages,
                table.block_table.to(q.device),
                step.lengths.to(q.device),
                head_dim_v=self.latent_dim,
                softmax_scale=softmax_scale,
                causal=step.queries > 1,
                k_scale=self.scale,
                backend=self.backend,
            )
        return out[..., : self.latent_dim].to(q.dtype)

    def read_history(self, layer: int) -> torch.Tensor:
        """A layer's rows of all committed columns, [b, columns, head_dim], in the dtype in which rows were written.

        Where a token was hidden, they are zeros.
        """
        if self._history_slots is None:
            batch = self._current_batch()
            self._history_slots = batch.table.slots(batch.columns.positions(), torch.int64)
        pages = self._pages[layer]
        return kv_cache.read(
            pages,
            self._history_slots.to(pages.device),
            cache_format=self.layout,
            scale=self.scale,
            dtype=self._dtype,
        )

    def holds(self, layer: int) -> bool:
        """Whether there is a history of this layer to read."""
        return self.columns > 0 and layer in self._pages

    def commit(self) -> None:
        """End the step: its tokens are history now."""
        step, batch = self._current_step(), self._current_batch()
        batch.columns.append(step.queries, step.stored)
        batch.table.lengths = step.lengths
        self._step = None
        self._forget_slots()

    def drop_columns(self, count: int) -> None:
        """Forget the last ``count`` columns, or all if there are fewer."""
        count = min(count, self.columns)
        if count == 0:
            return
        batch = self._current_batch()
        self._forget_slots()
        self._copy_pages(*batch.table.shorten(batch.table.lengths - batch.columns.drop(count)))

    def select(self, requests: torch.Tensor) -> None:
        """Make the batch these requests of the old one, int [n]; repeats are allowed."""
        if self._batch is None:
            return
        requests = requests.to(self._batch.table.device)
        self._forget_slots()
        self._batch.columns.select(requests)
        self._copy_pages(*self._batch.table.select(requests))

    def _batch_for(self, requests: int, device: torch.device) -> Batch:
        if self._batch is None:
            self._batch = Batch(PageTable(requests, self.page_size, device), Columns(requests, device))
        table = self._batch.table
        if table.requests != requests:
            raise ValueError(
                f"past_key_values holds {table.requests} requests, and the input has {requests}: "
                "batch_repeat_interleave and batch_select_indices change the batch of a cache"
            )
        if table.device != device:
            raise ValueError(
                f"past_key_values was filled on {table.device}, and the input is on {device}: "
                "begin with a new cache after moving the model"
            )
        return self._batch

    def _all_tokens(self) -> torch.Tensor:
        """Every stored token that a query sees, int32 [b, queries, columns rounded up], −1 filled."""
        if self._selection is None:
            step, batch = self._current_step(), self._current_batch()
            width = -(-(batch.columns.count + step.queries) // _SELECTION_MULTIPLE) * _SELECTION_MULTIPLE
            position = torch.arange(width, device=batch.table.device)
            later = torch.arange(step.queries - 1, -1, -1, device=batch.table.device)
            seen = position < (step.lengths[:, None] - later)[:, :, None]
            slots = batch.table.slots(position.expand(batch.table.requests, -1))
            self._selection = torch.where(seen, slots[:, None], -1)
        return self._selection

    def _query_dtype(self, q: torch.Tensor) -> torch.dtype:
        """A cache that is not quantised takes queries of its own dtype, a quantised one those of the model.

        But float32 queries of a quantised cache go to a GPU's kernels as bf16, which rounds less than the cache did.
        """
        if not (self.layout.fixed_split or self.layout.takes_scale):
            return self.layout.record_dtype
        for_kernels = q.dtype == torch.float32 and q.device.type != "cpu" and self.backend != "reference"
        return torch.bfloat16 if for_kernels else q.dtype

    def _pages_of(self, layer: int, device: torch.device) -> torch.Tensor:
        """The layer's cache tensor, with as many pages as the table has come to."""
        pages, wanted = self._pages.get(layer), self._current_batch().table.num_pages
        if pages is None or pages.shape[0] < wanted:
            # An inference tensor could not be written to outside of inference mode later.
            with torch.inference_mode(False):
                grown = kv_cache.allocate(self.layout, wanted, self.page_size, device=device)
            if pages is not None:
                grown[: pages.shape[0]].copy_(pages)
            self._pages[layer] = pages = grown
        return pages

    def _copy_pages(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        grown = [self._pages_of(layer, pages.device) for layer, pages in list(self._pages.items())]
        kv_cache.copy_blocks(grown, source.tolist(), destination.tolist())

    def _forget_slots(self) -> None:
        self._history_slots = self._selection = None

    def _current_batch(self) -> Batch:
        if self._batch is None:
            raise ValueError("past_key_values is empty")
        return self._batch

    def _current_step(self) -> Step:
        if self._step is None:
            raise ValueError(
                "a paged cache works inside a forward pass of the whole model: the attention of a layer called on "
                "its own does not know the attention mask"
            )
        return self._step
