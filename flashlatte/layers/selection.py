"""What an indexer chose in a step, and the plan by which prefill chooses: for DeepSeek-V3.2's sparse attention."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashlatte.layers.over_ranks import RowsOverRanks
from flashlatte.runtime.transfer import to_device

# Index logits that exist at once, and tokens whose rows are gathered at once: 302 MB in bf16.
LOGIT_BYTES, GATHER_TOKENS = 2**29, 2**18


@dataclass(frozen=True)
class SelectionChunk:
    """Consecutive prefill requests whose cached tokens, new ones included, are gathered together.

    Attributes:
        first, last: their tokens are ``first`` to ``last`` - 1 of the prefill part.
        keys: cached tokens of all.
        cu_keys: int32 [m + 1], where each request's tokens begin among them.
        key_start, key_end: int32 [last - first], the keys that each token may choose from.
        request_ids: int32 [last - first], the request of each token among the m.
        block_table: int32 [m, max_pages].
        gathers: whether attention reads gathered rows, to which the choice then points, and not the cache's slots.
        over_ranks: the rows and index keys, where other ranks have some of them; None where this has all.
    """

    first: int
    last: int
    keys: int
    cu_keys: torch.Tensor
    key_start: torch.Tensor
    key_end: torch.Tensor
    request_ids: torch.Tensor
    block_table: torch.Tensor
    gathers: bool
    over_ranks: RowsOverRanks | None = None


@dataclass
class Selection:
    """The tokens that a step's queries attend to, which layers may share.

    Attributes:
        topk: tokens that a query selects at most.
        slots: int32 [num_tokens, topk], where the chosen tokens lie in the cache (or among gathered rows, as the chunk
            says), then -1; those that another rank's cache has are not among them. None if no request can come to more
            than ``topk`` tokens, so that all are selected.
        chunks: of the prefill part; None if its requests have at most ``topk`` tokens, so that all are selected.
        logit_bytes: of index logits that may exist at once.
        made: whether an indexer has chosen in this step. It tells a layer that would share a choice from none.
    """

    topk: int
    slots: torch.Tensor | None
    chunks: tuple[SelectionChunk, ...] | None
    logit_bytes: int = LOGIT_BYTES
    made: bool = False

    def chosen(self, first: int, last: int) -> torch.Tensor:
        """The rows of tokens ``first`` to ``last`` - 1."""
        if self.slots is None:
            raise ValueError("metadata's selection has no slots: all tokens are selected")
        return self.slots[first:last]


def plan_selection(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    positions: torch.Tensor,
    block_table: torch.Tensor,
    *,
    gathers: bool,
    gather_tokens: int = GATHER_TOKENS,
) -> tuple[SelectionChunk, ...]:
    """Cut prefill requests into chunks of at most ``gather_tokens`` cached tokens, or one request.

    Args:
        query_lens, seq_lens: new tokens and all tokens of each request.
        positions: int [tokens], of each new token in its request, on the device.
        block_table: int32 [m, max_pages] on the device.
        gathers: whether attention reads gathered rows, which it does faster than the cache where it lies. A request
            with more than ``gather_tokens`` is read where it lies nevertheless.
    """
    device = positions.device
    chunks, token = [], 0
    for first, last in _spans(query_lens, seq_lens, gather_tokens):
        counts = torch.tensor(query_lens[first:last], device="cpu")
        # A request without new tokens needs no keys.
        lengths = [
            length if count else 0 for count, length in zip(query_lens[first:last], seq_lens[first:last], strict=True)
        ]
        starts = [0, *itertools.accumulate(lengths)]
        ids = torch.repeat_interleave(torch.arange(last - first, dtype=torch.int32, device="cpu"), counts)
        tokens, keys = len(ids), sum(lengths)
        if tokens:
            cu_keys, ids = to_device(starts, device, torch.int32), to_device(ids, device, torch.int32)
            start = cu_keys[ids.long()]
            end = (start + positions[token : token + tokens] + 1).to(torch.int32)
            table, gathered = block_table[first:last], gathers and keys <= gather_tokens
            chunks.append(SelectionChunk(token, token + tokens, keys, cu_keys, start, end, ids, table, gathered))
        token += tokens
    return tuple(chunks)


def _spans(query_lens: Sequence[int], seq_lens: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Requests ``first`` to ``last`` - 1 of each chunk."""
    spans, first, keys = [], 0, 0
    for request, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        length = length if count else 0
        if request > first and keys + length > room:
            spans.append((first, request))
            first, keys = request, 0
        keys += length
    return [*spans, (first, len(query_lens))]
