"""Metadata of a step of an MLA layer: positions and slots of its tokens, and its decode and prefill parts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from flashlatte.kv_cache import get_format
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.layers.selection import IndexSelection
from flashlatte.layers.sharded_keys import ShardedDecode, ShardedRows
from flashlatte.ops.index_convert import to_cache_indices
from flashlatte.runtime.transfer import to_device

_Dataclass = TypeVar("_Dataclass")


@dataclass(frozen=True)
class DecodePart:
    """The leading requests of the batch, which attend in absorbed form over the pages.

    Attributes:
        queries: new tokens of each request, or the maximum if they differ. The last of them is the request's last.
        block_table: int32 [n, max_pages], pages of each request.
        seq_lens: int32 [n], tokens of each request, including those of this step.
        pad_index: int64 [n · queries], the token of each row of the padded batch; padding comes before a request's
            tokens and repeats one of them. None if all requests have ``queries`` tokens.
        unpad_index: int64 [tokens], the row of each token in the padded batch; given with ``pad_index``.
        all_slots: int32 [n, width], slots of a request's tokens in order, for cache formats without dense decode;
            None for others.
        visible_lens: int32 [n, queries], the number of ``all_slots`` that each query attends to.
        sharded: attention over the keys of all ranks; None if the keys are not sharded.
    """

    queries: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    pad_index: torch.Tensor | None = None
    unpad_index: torch.Tensor | None = None
    all_slots: torch.Tensor | None = None
    visible_lens: torch.Tensor | None = None
    sharded: ShardedDecode | None = None

    @property
    def requests(self) -> int:
        return self.block_table.shape[0]


@dataclass(frozen=True)
class ContextChunk:
    """Cached tokens of consecutive prefill requests that fit the workspace together.

    Attributes:
        first, last: the queries of these requests are tokens ``first`` to ``last`` - 1 of the prefill part.
        tokens: cached tokens in the chunk.
        max_queries, max_keys: maximum of a request in the chunk.
        cu_queries, cu_keys: int32 [m + 1], offsets of each request's queries and keys.
        starts: int32 [m], position of each request's first cached token in the chunk.
        block_table: int32 [m, max_pages].
        sharded: gathers the rows from all ranks; None if the keys are not sharded.
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
    sharded: ShardedRows | None = None


@dataclass(frozen=True)
class PrefillPart:
    """The requests after the decode part, which attend in multi-head form.

    Attributes:
        cu_seqlens: int32 [m + 1], offsets of each request's new tokens in the prefill part.
        max_queries: maximum number of new tokens of a request.
        chunks: the cached tokens of these requests, in order. Empty if an indexer selects among them.
        workspace: [rows, latent + rope], a buffer for the rows of a chunk. Allocated for each chunk if None, or if its
            dtype is not that of the queries.
    """

    cu_seqlens: torch.Tensor
    max_queries: int
    chunks: tuple[ContextChunk, ...] = ()
    workspace: torch.Tensor | None = None


@dataclass
class BuilderBuffers:
    """Identifies the step that a builder's buffers hold.

    Attributes:
        num_builds: number of ``build`` calls; the buffers hold the last one.
    """

    num_builds: int = 0


@dataclass(frozen=True)
class MLAMetadata:
    """A flat batch of tokens, decode requests first. All layers of a model share it.

    Attributes:
        num_tokens: tokens in the batch.
        num_decode_tokens: tokens of the decode part.
        max_seq_len: tokens of the longest request, or an upper bound.
        page_size: tokens in a page of the cache.
        num_pages: minimum number of pages of the cache; None if not given.
        required_pages: pages that this step uses, as far as block table and slots were on the host; 0 if unknown.
        positions: int [num_tokens], position of each token in its request.
        slot_mapping: int [num_tokens], slot of each token in the cache; below 0 it is not stored.
        decode, prefill: the two parts; None if empty.
        selection: the indexers' selection; None for layers without an indexer.
        windows: int32 [num_tokens, width] for each width of a sliding window, the slots of each token's window.
        sharding: the rank's share of the keys; None: all of them.
        buffers, build_index: the builder's buffers that hold the tensors, and the index of this build; None if the
            tensors are not shared.
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
    selection: IndexSelection | None = None
    windows: Mapping[int, torch.Tensor] = field(default_factory=dict)
    sharding: Sharding | None = None
    buffers: BuilderBuffers | None = None
    build_index: int = 0
    required_pages: int = 0

    @property
    def is_overwritten(self) -> bool:
        """Whether a later ``build`` has overwritten the buffers."""
        return self.buffers is not None and self.buffers.num_builds != self.build_index

    def check_cache(self, pages: torch.Tensor) -> None:
        """Check that a cache fits; kernels cannot detect pages or slots of another cache or step."""
        # These values change at every step, and torch.compile would recompile for each.
        if not torch.compiler.is_compiling():
            if self.is_overwritten:
                raise ValueError("metadata must be the last one its builder built: its buffers now hold another step")
            if self.required_pages > pages.shape[0]:
                raise ValueError(
                    f"cache must have at least {self.required_pages} pages for this metadata, got {pages.shape[0]}"
                )
        if self.page_size != pages.shape[1]:
            raise ValueError(
                f"cache must have pages of {self.page_size} tokens like the metadata, got pages of {pages.shape[1]}"
            )
        if self.num_pages is not None and self.num_pages > pages.shape[0]:
            raise ValueError(f"cache must have the metadata's {self.num_pages} pages, got {pages.shape[0]}")
        if self.positions.device != pages.device:
            raise ValueError(f"metadata must be on {pages.device} like the cache, got {self.positions.device}")

    def to(self, device: torch.device) -> MLAMetadata:
        """A copy on another device. On the same device it shares the tensors, which a later ``build`` overwrites."""
        moved = _to_device(self, device)
        return dataclasses.replace(moved, buffers=self.buffers if moved.positions is self.positions else None)


def _to_device(part: _Dataclass, device: torch.device) -> _Dataclass:
    values: dict[str, Any] = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}  # type: ignore[arg-type]
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            values[name] = value.to(device)
        elif dataclasses.is_dataclass(value):
            values[name] = _to_device(value, device)
        elif isinstance(value, dict):
            values[name] = {key: item.to(device) for key, item in value.items()}
        elif isinstance(value, tuple) and not isinstance(value, Sharding):
            values[name] = tuple(_to_device(item, device) for item in value)
    return type(part)(**values)


def uses_sparse_decode(cache_format: str) -> bool:
    """Whether dense attention over this format uses ``sparse_decode`` with the slots of all tokens."""
    return not get_format(cache_format).plain


def needs_gathered_rows(cache_format: str) -> bool:
    """Whether sparse prefill over this format needs gathered rows: its kernels cannot read the stored bytes."""
    layout = get_format(cache_format)
    return not layout.plain or layout.takes_scale


def plan_chunks(
    query_lens: list[int], context_lens: list[int], block_table: torch.Tensor, workspace_tokens: int
) -> tuple[ContextChunk, ...]:
    """Split the cached tokens of prefill requests into chunks of at most ``workspace_tokens``, in order.

    Args:
        query_lens, context_lens: new tokens and cached tokens of each request.
        block_table: int32 [m, max_pages] on the device.
    """
    spans = _spans(context_lens, workspace_tokens)
    plans, values = [], []
    starts_of_queries = [*itertools.accumulate(query_lens, initial=0)]
    for span in spans:
        first, last = span[0][0], span[-1][0] + 1
        taken = {request: (start, length) for request, start, length in span}
        lengths = [taken.get(request, (0, 0))[1] for request in range(first, last)]
        cu_keys = [*itertools.accumulate(lengths, initial=0)]
        cu_queries = [start - starts_of_queries[first] for start in starts_of_queries[first : last + 1]]
        starts = [taken.get(request, (0, 0))[0] for request in range(first, last)]
        plans.append((first, last, cu_keys[-1], max(query_lens[first:last]), max(lengths)))
        values += cu_queries + cu_keys + starts
    # One host-to-device copy for all chunks.
    on_device = to_device(values, block_table.device, torch.int32)
    chunks, offset = [], 0
    for first, last, tokens, max_queries, max_keys in plans:
        count = last - first
        cu_queries, cu_keys, starts = on_device[offset : offset + 3 * count + 2].split((count + 1, count + 1, count))
        offset += 3 * count + 2
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


def _spans(context_lens: list[int], chunk_tokens: int) -> list[list[tuple[int, int, int]]]:
    """The (request, first token, number of tokens) spans of each chunk."""
    spans: list[list[tuple[int, int, int]]] = []
    free = 0
    for request, context in enumerate(context_lens):
        start = 0
        while start < context:
            if free == 0:
                spans.append([])
                free = chunk_tokens
            length = min(free, context - start)
            spans[-1].append((request, start, length))
            start, free = start + length, free - length
    return spans


def window_slots(
    positions: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, page_size: int, width: int
) -> torch.Tensor:
    """Slots of the tokens at positions p - width + 1 to p of each token's request, int32 [T, width].

    -1 before the first token.

    Args:
        positions: int64 [T], position p of each token in its request.
        request_ids: int [T], the row of each token's request in ``block_table``; -1 for a token without a request.
        block_table: int32 [n, max_pages].
    """
    back = torch.arange(width - 1, -1, -1, device=positions.device)
    return to_cache_indices(positions[:, None] - back, block_table, page_size, request_ids=request_ids)


def request_ids(query_lens: list[int]) -> torch.Tensor:
    """The request of each token of a flat batch, int64 [tokens] on the CPU."""
    requests = torch.arange(len(query_lens), device="cpu")
    return torch.repeat_interleave(requests, torch.tensor(query_lens, dtype=torch.int64, device="cpu"))
