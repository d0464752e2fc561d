"""What a step of an MLA layer is about: which tokens, whose, where in the cache, and in which form they attend."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flashlatte.kv_cache import get_format
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.layers.over_ranks import DecodeOverRanks, RowsOverRanks
from flashlatte.layers.selection import Selection
from flashlatte.runtime.transfer import to_device

_Part = TypeVar("_Part")


@dataclass(frozen=True)
class DecodePart:
    """The batch's first requests, which attend in absorbed form over the pages.

    Attributes:
        queries: tokens of each request (of the longest, if they differ); the last of them is the request's last.
        block_table: int32 [n, max_pages], pages of each request.
        seq_lens: int32 [n], tokens of each request, those of this step included.
        pad_index: if the requests have different numbers of tokens, int64 [n · queries]: the token of each row of the
            padded batch, where padding, before a request's tokens, repeats one of them. None if all have ``queries``.
        unpad_index: beside ``pad_index``, int64 [tokens], the row of each token in the padded batch.
        every_slot: int32 [n, width], slots of a request's tokens in order, for cache formats of which there is no
            dense decode; None for the others.
        seen: beside ``every_slot``, int32 [n, queries], how many of them each query sees.
        over_ranks: attention over the keys of all ranks, where other ranks have some of them; None where this has all.
    """

    queries: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    pad_index: torch.Tensor | None = None
    unpad_index: torch.Tensor | None = None
    every_slot: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    over_ranks: DecodeOverRanks | None = None

    @property
    def requests(self) -> int:
        return self.block_table.shape[0]


@dataclass(frozen=True)
class ContextChunk:
    """Cached tokens of consecutive prefill requests that fit the workspace together.

    Attributes:
        first, last: the queries of these requests are tokens ``first`` to ``last`` - 1 of the prefill part.
        tokens: cached tokens in the chunk.
        max_queries, max_keys: of a request in it.
        cu_queries, cu_keys: int32 [m + 1], where each request's queries and keys begin.
        starts: int32 [m], the first cached token of each request that is in the chunk.
        block_table: int32 [m, max_pages].
        over_ranks: the rows, where other ranks have some of them; None where this has all.
    """

    first: int
    last: int
    tokens: int
    max_queries: int
    max_keys: int
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    starts: torch.Tensor
    block_table: torch.Tensor
    over_ranks: RowsOverRanks | None = None


@dataclass(frozen=True)
class PrefillPart:
    """The requests behind the decode part, which attend in multi-head form.

    Attributes:
        cu_seqlens: int32 [m + 1], where each request's new tokens begin in the prefill part.
        max_queries: new tokens of the longest request.
        chunks: the tokens that they have in the cache already, in order. Empty where an indexer selects among them.
        workspace: [rows, latent + rope], where the rows of a chunk go for a while; made for each chunk if None, or of
            another dtype than the queries.
    """

    cu_seqlens: torch.Tensor
    max_queries: int
    chunks: tuple[ContextChunk, ...] = ()
    workspace: torch.Tensor | None = None


@dataclass
class Buffers:
    """Which step a builder's buffers hold.

    Attributes:
        builds: steps whose metadata they have held; the last of them is the one that they hold.
    """

    builds: int = 0


@dataclass(frozen=True)
class MLAMetadata:
    """A flat batch of tokens, those of decode requests first; one for all layers of a model.

    Attributes:
        num_tokens: tokens in the batch.
        num_decode_tokens: how many of them are the decode part's.
        max_seq_len: tokens of the longest request, or a bound.
        page_size: tokens in a page of the cache whose pages and slots these are.
        num_pages: pages that the cache has at least; None if that is not known.
        pages_reached: pages that it must have for this step, as far as they were on the host; 0 if none was.
        positions: int [num_tokens], of each token in its request.
        slot_mapping: int [num_tokens], where each token goes in the cache; below 0 it is not stored.
        decode, prefill: the two parts; None if empty.
        selection: for layers with an indexer: what it chose; None for layers without.
        sharding: which of the keys the cache has; None: all of them.
        buffers, build: what its tensors lie in, and its number among the steps built there; None if they are its own.
    """

    num_tokens: int
    num_decode_tokens: int
    max_seq_len: int
    page_size: int
    num_pages: int | None
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decode: DecodePart | None
    prefill: PrefillPart | None
    selection: Selection | None = None
    sharding: Sharding | None = None
    buffers: Buffers | None = None
    build: int = 0
    pages_reached: int = 0

    @property
    def is_overwritten(self) -> bool:
        """Whether its buffers hold another step by now."""
        return self.buffers is not None and self.buffers.builds != self.build

    def to(self, device: torch.device) -> MLAMetadata:
        """The same on another device."""
        return _moved(self, device)


def _moved(part: _Part, device: torch.device) -> _Part:
    values: dict[str, Any] = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}  # type: ignore[arg-type]
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            values[name] = value.to(device)
        elif dataclasses.is_dataclass(value):
            values[name] = _moved(value, device)
        elif isinstance(value, tuple) and not isinstance(value, Sharding):
            values[name] = tuple(_moved(item, device) for item in value)
    return type(part)(**values)


def selects_every_token(cache_format: str) -> bool:
    """Whether decode over this format goes through ``sparse_decode`` with every token selected."""
    return not get_format(cache_format).plain


def gathers_rows(cache_format: str) -> bool:
    """Whether sparse prefill over this format goes over rows gathered from it: they are not numbers as they lie."""
    layout = get_format(cache_format)
    return not layout.plain or layout.takes_scale


def plan_chunks(
    query_lens: list[int], context_lens: list[int], block_table: torch.Tensor, workspace_tokens: int
) -> tuple[ContextChunk, ...]:
    """Cut the cached tokens of prefill requests into chunks of at most ``workspace_tokens``, in order.

    Args:
        query_lens, context_lens: of each request.
        block_table: int32 [m, max_pages] on the device.
    """
    spans = _spans(context_lens, workspace_tokens)
    plans, numbers = [], []
    starts_of_queries = [*itertools.accumulate(query_lens, initial=0)]
    for span in spans:
        first, last = span[0][0], span[-1][0] + 1
        taken = {request: (start, length) for request, start, length in span}
        lengths = [taken.get(request, (0, 0))[1] for request in range(first, last)]
        cu_keys = [*itertools.accumulate(lengths, initial=0)]
        cu_queries = [start - starts_of_queries[first] for start in starts_of_queries[first : last + 1]]
        starts = [taken.get(request, (0, 0))[0] for request in range(first, last)]
        plans.append((first, last, cu_keys[-1], max(query_lens[first:last]), max(lengths)))
        numbers += cu_queries + cu_keys + starts
    # One copy to the device for the whole plan.
    on_device = to_device(numbers, block_table.device, torch.int32)
    chunks, place = [], 0
    for first, last, tokens, max_queries, max_keys in plans:
        count = last - first
        cu_queries, cu_keys, starts = on_device[place : place + 3 * count + 2].split((count + 1, count + 1, count))
        place += 3 * count + 2
        chunks.append(
            ContextChunk(
                starts_of_queries[first],
                starts_of_queries[last],
                tokens,
                max_queries,
                max_keys,
                cu_queries,
                cu_keys,
                starts,
                block_table[first:last],
            )
        )
    return tuple(chunks)


def _spans(context_lens: list[int], room: int) -> list[list[tuple[int, int, int]]]:
    """Chunks as (request, first token, tokens), each request's tokens in order."""
    spans: list[list[tuple[int, int, int]]] = []
    free = 0
    for request, context in enumerate(context_lens):
        start = 0
        while start < context:
            if free == 0:
                spans.append([])
                free = room
            length = min(free, context - start)
            spans[-1].append((request, start, length))
            start, free = start + length, free - length
    return spans
