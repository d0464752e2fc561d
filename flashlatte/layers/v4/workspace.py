"""Prefill over a workspace: what many new tokens of a request see is gathered once, and not read by each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flashlatte.runtime import checks
from flashlatte.runtime.transfer import to_device


@dataclass(frozen=True)
class WorkspaceLimits:
    """Which requests attend over a workspace, and how much of it there is at a time.

    On an H200 a layer's prefill takes 9% less over a workspace with 1,024 new tokens, and 15% less with 4,096
    (``docs/notes/deepseek-v4.md``). With fewer the host's launches take longer than the GPU, and a workspace needs more
    of them. A key costs a query 0.49 ns in ``sparse_decode`` (H100, model1-b128-sq2-h64-top128+512) and 0.31 ns in
    ``sparse_prefill`` (d512-h64-top512-kv65536). For 640 keys that is 0.11 µs less, as much as 150 rows cost in
    ``cache_gather`` (gather-v32-65536).

    Attributes:
        queries: new tokens of a request, from which on it attends over a workspace.
        rows_a_query: with more rows than so many for each of them, it does not.
        rows: of a workspace; 64 MiB in bf16. A request that needs more reads its pages.
        indices: numbers that say which rows the tokens see, at most: 64 MiB. More tokens come one part after the other.
    """

    queries: int = 1024
    rows_a_query: int = 128
    rows: int = 2**16
    indices: int = 2**24

    def __post_init__(self) -> None:
        for name in ("queries", "rows_a_query", "rows", "indices"):
            checks.positive_int(name, getattr(self, name))


DEFAULT_LIMITS = WorkspaceLimits()


# Of each token the rows that it sees, int32 [n, any], and how many, int32 [n].
RowsSeen = tuple[torch.Tensor, torch.Tensor]


class Gathered(NamedTuple):
    """What is gathered of m requests, int64 [m] each: from which row of the workspace on, and which rows of a cache."""

    rows: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True)
class WorkspaceChunk:
    """Tokens of m consecutive requests that attend together. Each request has as many rows: its groups, then its
    tokens.

    Attributes:
        tokens: of the step.
        requests: their rows in the step's tables: a range, or int64 [m] if they do not follow each other one by one.
        cu_queries: int32 [m + 1], where each request's tokens begin among these.
        seq_lens: int32 [m], tokens of each request up to the last of these.
        gather_lens: int32 [m], how many of them windows reach.
        groups, window: what is gathered.
        group_rows, rows: of each request.
        seen: what tokens see, kept by the first layer that selects nothing for those behind it. None in all chunks of a
            plan but one, as it may be large.
    """

    tokens: slice
    requests: slice | torch.Tensor
    cu_queries: torch.Tensor
    seq_lens: torch.Tensor
    gather_lens: torch.Tensor
    groups: Gathered
    window: Gathered
    group_rows: int
    rows: int
    seen: list[RowsSeen] | None

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True)
class _Span:
    """New tokens ``begin`` to ``end`` - 1 of a request, the first of which is token ``first`` of the step."""

    request: int
    first: int
    begin: int
    end: int

    @property
    def queries(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class V4Prefill:
    """The new tokens of a step's requests, as the host knows them, and the plans that layers make of them.

    Attributes:
        spans: (first, end) positions of each request's new tokens.
        window: of the layers.
        limits: of workspaces.
        device: of the plans' tensors.
        first_tokens: int [b], the first token of each request that windows see; all if None.
    """

    spans: tuple[tuple[int, int], ...]
    window: int
    limits: WorkspaceLimits
    device: torch.device
    first_tokens: torch.Tensor | None = None
    _plans: dict[tuple[int, int | None], tuple[WorkspaceChunk, ...]] = field(default_factory=dict)

    def plan(self, ratio: int, topk: int | None) -> tuple[WorkspaceChunk, ...]:
        """The chunks of layers with groups of ``ratio`` tokens (0: none) of which ``topk`` are selected (None: all)."""
        if (ratio, topk) not in self._plans:
            packed = _packed(list(self._parts(ratio, topk)), ratio, topk, self.window, self.limits)
            self._plans[ratio, topk] = tuple(
                self._chunk(spans, ratio, seen=None if number else []) for number, spans in enumerate(packed)
            )
        return self._plans[ratio, topk]

    def _parts(self, ratio: int, topk: int | None) -> Iterator[_Span]:
        """The spans that attend over a workspace, cut where their indices would be too many."""
        first = 0
        for request, (begin, end) in enumerate(self.spans):
            whole = _Span(request, first, begin, end)
            first += whole.queries
            rows = _rows(whole, ratio, self.window)
            if whole.queries < self.limits.queries or rows > self.limits.rows_a_query * whole.queries:
                continue
            if rows > self.limits.rows:
                continue
            count = max(self.limits.indices // _width(whole, ratio, topk, self.window), 1)
            for at in range(begin, end, count):
                yield _Span(request, whole.first + at - begin, at, min(at + count, end))

    def _chunk(self, spans: Sequence[_Span], ratio: int, seen: list[RowsSeen] | None) -> WorkspaceChunk:
        starts = [span.first - spans[0].first for span in spans]
        ends = [span.end for span in spans]
        gathered = [_tokens(span, self.window) for span in spans]
        groups = [_groups(span, ratio) for span in spans]
        requests = [span.request for span in spans]
        queries = starts[-1] + spans[-1].queries
        count, group_rows = len(spans), max(groups)
        rows = group_rows + max(gathered)
        firsts = [number * rows for number in range(count)]
        # One copy to the device for all of a type.
        lengths = to_device([*starts, queries, *ends, *gathered], self.device, torch.int32)
        cu_queries, seq_lens, gather_lens = lengths.split((count + 1, count, count))
        begins = [end - tokens for end, tokens in zip(ends, gathered, strict=True)]
        window_rows = [first + group_rows for first in firsts]
        numbers = to_device([firsts, [0] * count, groups, window_rows, begins, ends, requests], self.device)
        window = Gathered(*numbers[3:6])
        if self.first_tokens is not None:
            gather_lens = gather_lens.minimum(seq_lens - self.first_tokens[numbers[6]]).clamp_min(0)
            window = window._replace(starts=window.ends - gather_lens)
        rows_of_tables = range(requests[0], requests[0] + count)
        first = spans[0].first
        return WorkspaceChunk(
            slice(first, first + queries),
            slice(rows_of_tables.start, rows_of_tables.stop) if requests == list(rows_of_tables) else numbers[6],
            cu_queries,
            seq_lens,
            gather_lens,
            Gathered(*numbers[:3]),
            window,
            group_rows,
            rows,
            seen,
        )


def paged_parts(chunks: Sequence[WorkspaceChunk], tokens: int) -> Iterator[slice]:
    """The tokens of a step, as far as they are in none of the chunks."""
    begin = 0
    for chunk in chunks:
        if begin < chunk.tokens.start:
            yield slice(begin, chunk.tokens.start)
        begin = chunk.tokens.stop
    if begin < tokens:
        yield slice(begin, tokens)


def _packed(
    parts: Sequence[_Span], ratio: int, topk: int | None, window: int, limits: WorkspaceLimits
) -> Iterator[list[_Span]]:
    """Parts that follow each other and fit a workspace together."""
    packed: list[_Span] = []
    for part in parts:
        together = [*packed, part]
        adjoins = not packed or packed[-1].first + packed[-1].queries == part.first
        rows = max(_groups(span, ratio) for span in together) + max(_tokens(span, window) for span in together)
        width = max(_width(span, ratio, topk, window) for span in together)
        indices = width * sum(span.queries for span in together)
        if packed and (not adjoins or len(together) * rows > limits.rows or indices > limits.indices):
            yield packed
            packed = []
        packed.append(part)
    if packed:
        yield packed


def _groups(span: _Span, ratio: int) -> int:
    return span.end // ratio if ratio else 0


def _tokens(span: _Span, window: int) -> int:
    """Tokens that the windows of a span reach."""
    return min(span.end, span.queries + window - 1)


def _rows(span: _Span, ratio: int, window: int) -> int:
    return _groups(span, ratio) + _tokens(span, window)


def _width(span: _Span, ratio: int, topk: int | None, window: int) -> int:
    """Rows that a token of a span may see."""
    groups = _groups(span, ratio)
    return window + (groups if topk is None else min(topk, groups))
