"""The indexer of GLM-5.3-Flash, which selects pools of tokens: transformers' module over states in pages.

The module derives the keys of pools from a state of each token, which is cached like a row of latents. It computes the
requests of a step one by one, over the states of all tokens of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte import kv_cache
from flashlatte.engine.batch import StepBatch
from flashlatte.ops.cache_write import cache_write
from flashlatte.ops.index_convert import to_cache_indices
from flashlatte.runtime.transfer import to_device

# Tokens of a request that are scored at a time: scores are float32 [tokens, heads, pools].
_TOKENS = 256


@dataclass
class PooledStep:
    """The requests of a step, and the selection of the last indexer.

    Attributes:
        counts, lengths: as in ``StepBatch``.
        block_table: int32 [requests, max_pages] on the device.
        page_size: tokens in a page.
        slots: int32 [T, n], the slots that each token attends to, then -1; None before the first indexer.
    """

    counts: Sequence[int]
    lengths: Sequence[int]
    block_table: torch.Tensor
    page_size: int
    slots: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: StepBatch, page_size: int, device: torch.device) -> PooledStep:
        return cls(batch.counts, batch.lengths, to_device(batch.page_table(), device, torch.int32), page_size)

    def selection(self) -> torch.Tensor:
        """The selection for a layer, of its own indexer or of one before it."""
        if self.slots is None:
            raise ValueError("a layer that shares a selection must follow one with an indexer, got none before")
        return self.slots

    def slots_of(self, request: int) -> torch.Tensor:
        """int64 [length], the slots of a request's tokens."""
        offsets = torch.arange(self.page_size, device=self.block_table.device)
        slots = self.block_table[request].long()[:, None] * self.page_size + offsets
        return slots.flatten()[: self.lengths[request]]


class _RequestStates:
    """Cache argument of the module: the states of a request's tokens, in pages.

    Args:
        pages: [pages, page_size, 1, width].
        slots: int64 [length], slots of the tokens, the last of which are new.
        num_cached: tokens before the new ones.
    """

    def __init__(self, pages: torch.Tensor, slots: torch.Tensor, num_cached: int) -> None:
        self._pages, self._slots, self._num_cached = pages, slots, num_cached

    @property
    def layers(self) -> LayersOfLength:
        return LayersOfLength(len(self._slots))

    def update_indexer(self, states: torch.Tensor, layer: int) -> torch.Tensor:
        """Store the states [1, tokens, width + 1] of new tokens; returns those of all.

        The last element is 1 for tokens and 0 for padding.
        """
        cache_write(self._pages, self._slots[self._num_cached :], states[0, :, :-1].contiguous())
        stored = kv_cache.read(self._pages, self._slots, dtype=states.dtype)[None]
        return torch.cat((stored, states.new_ones(1, len(self._slots), 1)), dim=-1)


class LayersOfLength:
    """The layers of a transformers cache, each of which has ``tokens`` tokens. The indexer reads only this number."""

    def __init__(self, tokens: int) -> None:
        self.keys = torch.empty(1, 1, tokens, 0, device="meta")

    def __getitem__(self, layer: int) -> LayersOfLength:
        return self

    def get_seq_length(self) -> int:
        return self.keys.shape[2]


class PooledIndexer:
    """The indexer of an attention module.

    Args:
        attention: transformers' ``Glm5NextTextAttention``, with an indexer.
    """

    def __init__(self, attention: Any) -> None:
        self._attention, self._module = attention, attention.indexer
        # Keys and gates.
        self.state_width: int = 2 * attention.indexer.head_dim

    def select(self, hidden: torch.Tensor, pages: torch.Tensor, step: PooledStep) -> None:
        """Store the states of hidden states [T, hidden_size], and set the step's selection.

        Args:
            pages: [pages, page_size, 1, width], the layer's states, with the slots of its latents.
        """
        latents = self._attention.q_a_layernorm(self._attention.q_a_proj(hidden))
        selected, first = [], 0
        for request, (count, length) in enumerate(zip(step.counts, step.lengths, strict=True)):
            slots = step.slots_of(request)
            for begin in range(0, count, _TOKENS):
                tokens = min(_TOKENS, count - begin)
                cached = length - count + begin
                rows = slice(first + begin, first + begin + tokens)
                states = _RequestStates(pages, slots[: cached + tokens], cached)
                selected.append(self._select(hidden[rows], latents[rows], states))
            first += count
        requests = torch.arange(len(step.counts)).repeat_interleave(torch.tensor(step.counts))
        request_ids = to_device(requests, hidden.device, torch.int32)
        positions = torch.cat(selected)
        step.slots = to_cache_indices(positions, step.block_table, step.page_size, request_ids=request_ids)

    def _select(self, hidden: torch.Tensor, latents: torch.Tensor, states: _RequestStates) -> torch.Tensor:
        """Positions int32 [tokens, n] that new tokens of a request attend to, then -1."""
        visible = torch.ones(1, len(hidden), dtype=torch.bool, device=hidden.device)
        return self._module(hidden[None], latents[None], visible, states)[0]
