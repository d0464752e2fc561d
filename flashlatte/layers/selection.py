"""The tokens that an indexer selects in a step, and the chunks in which prefill selects (DeepSeek-V3.2)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashlatte.layers.sharded_keys import ShardedRows
from flashlatte.runtime.transfer import to_device

# Limits on the index logits allocated at once, and on the tokens whose rows are gathered at once (302 MB in bf16).
LOGIT_BYTES, GATHER_TOKENS = 2**29, 2**18


@dataclass(frozen=True)
class SelectionChunk:
    """Consecutive prefill requests whose tokens, cached and new, are gathered together.

    Attributes:
        first, last: the new tokens of these requests are ``first`` to ``last`` - 1 of the prefill part.
        num_keys: tokens of all of these requests.
        cu_keys: int32 [m + 1], offsets of each request's tokens among the keys.
        key_start, key_end: int32 [last - first], the range of keys that each token selects from.
        request_ids: int32 [last - first], the request of each token among the m.
        block_table: int32 [m, max_pages].
        use_gathered_rows: whether selected indices refer to gathered rows instead of the cache's slots.
        sharded: gathers rows and index keys from all ranks; None if the keys are not sharded.
    """

    first: int
    last: int
    num_keys: int
    cu_keys: torch.Tensor
    key_start: torch.Tensor
    key_end: torch.Tensor
    request_ids: torch.Tensor
    block_table: torch.Tensor
    use_gathered_rows: bool
    sharded: ShardedRows | None = None


@dataclass
class IndexSelection:
    """The selected tokens of a step's queries, which layers may share.

    Attributes:
        topk: maximum number of tokens that a query selects.
        slots: int32 [num_tokens, topk], the selected slots (or indices of gathered rows, as the chunk says), then -1.
            Tokens on other ranks are left out. None if no request has more than ``topk`` tokens: all are selected.
        chunks: chunks of the prefill part; None if its requests have at most ``topk`` tokens: all are selected.
        logit_bytes: limit on the index logits allocated at once.
        is_filled: whether an indexer has selected in this step; a layer that shares the selection requires it.
    """

    topk: int
    slots: torch.Tensor | None
    chunks: tuple[SelectionChunk, ...] | None
    logit_bytes: int = LOGIT_BYTES
    is_filled: bool = False

    def rows(self, first: int, last: int) -> torch.Tensor:
        """The slots [n, topk] of tokens ``first`` to ``last`` - 1."""
        if self.slots is None:
            raise ValueError("metadata's selection has no slots: all tokens are selected")
        return self.slots[first:last]


def plan_selection(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    positions: torch.Tensor,
    block_table: torch.Tensor,
    *,
    use_gathered_rows: bool,
    gather_tokens: int = GATHER_TOKENS,
) -> tuple[SelectionChunk, ...]:
    """Split prefill requests into chunks of at most ``gather_tokens`` cached tokens, or of one request.

    Args:
        query_lens, seq_lens: new tokens and all tokens of each request.
        positions: int [tokens], position of each new token in its request, on the device.
        block_table: int32 [m, max_pages] on the device.
        use_gathered_rows: whether attention reads gathered rows. A request with more than ``gather_tokens`` tokens
            is read from the cache in any case.
    """
    device = positions.device
    chunks, token = [], 0
    for first, last in _spans(query_lens, seq_lens, gather_tokens):
        counts = torch.tensor(query_lens[first:last], device="cpu")
        # A request without new tokens selects nothing.
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
            table, gathered = block_table[first:last], use_gathered_rows and keys <= gather_tokens
            chunks.append(SelectionChunk(token, token + tokens, keys, cu_keys, start, end, ids, table, gathered))
        token += tokens
    return tuple(chunks)


def _spans(query_lens: Sequence[int], seq_lens: Sequence[int], chunk_tokens: int) -> list[tuple[int, int]]:
    """The requests (first, last + 1) of each chunk."""
    spans, first, keys = [], 0, 0
    for request, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        length = length if count else 0
        if request > first and keys + length > chunk_tokens:
            spans.append((first, request))
            first, keys = request, 0
        keys += length
    return [*spans, (first, len(query_lens))]
