"""Plans prefill over a workspace: rows that many new tokens of a request attend to are gathered once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flashlatte.runtime import checks
from flashlatte.runtime.transfer import to_device


@dataclass(frozen=True)
class WorkspaceLimits:
    """Which requests attend over a workspace, and the size of the workspace.

    On an H200, a layer's prefill over a workspace takes 9% less time with 1,024 new tokens and 15% less with 4,096
    (``docs/notes/deepseek-v4.md``). With fewer tokens the step is bound by launches, and a workspace needs more of
    them. A key costs a query 0.49 ns in ``sparse_decode`` (H100, model1-b128-sq2-h64-top128+512) and 0.31 ns in
    ``sparse_prefill`` (d512-h64-top512-kv65536). For 640 keys the difference is 0.11 µs, the cost of gathering 150 rows
    (gather-v32-65536).

    Attributes:
        min_queries: minimum number of new tokens of a request that attends over a workspace.
        max_rows_per_query: maximum number of gathered rows for each of them.
        max_rows: rows of a workspace; 64 MiB in bf16. A request that needs more reads its pages.
        max_indices: limit on the row indices of a chunk; 64 MiB. Requests with more are split.
    """

    min_queries: int = 1024
    max_rows_per_query: int = 128
    max_rows: int = 2**16
    max_indices: int = 2**24

    def __post_init__(self) -> None:
        for name in ("min_queries", "max_rows_per_query", "max_rows", "max_indices"):
            checks.positive_int(name, getattr(self, name))


DEFAULT_LIMITS = WorkspaceLimits()


# The rows that each token attends to, int32 [n, any], and their number, int32 [n].
VisibleRows = tuple[torch.Tensor, torch.Tensor]


class Gathered(NamedTuple):
    """Rows to gather for m requests, int64 [m] each: the first workspace row, and the range of cache rows."""

    rows: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True)
class WorkspaceChunk:
    """Tokens of m consecutive requests that attend together. Every request has ``rows`` rows: groups, then tokens.

    Attributes:
        tokens: the chunk's tokens in the step.
        requests: rows of the requests in the step's tables: a slice, or int64 [m] if they are not consecutive.
        cu_queries: int32 [m + 1], offsets of each request's tokens in the chunk.
        seq_lens: int32 [m], tokens of each request up to its last token in the chunk.
        gather_lens: int32 [m], tokens of each request that windows reach.
        groups, window: the rows to gather.
        group_rows, rows: rows of each request.
        visible: the rows that tokens attend to, cached by the first layer that selects nothing, for later layers. None
            in all chunks of a plan but the first, since it may be large.
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
    visible: list[VisibleRows] | None

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True)
class _Span:
    """New tokens ``begin`` to ``end`` - 1 of a request, starting at token ``first`` of the step."""

    request: int
    first: int
    begin: int
    end: int

    @property
    def queries(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class V4Prefill:
    """The new tokens of a step's requests on the host, and the cached workspace plans of layers.

    Attributes:
        spans: (first, end) positions of each request's new tokens.
        window: window of the layers.
        limits: limits of workspaces.
        device: device of the plans' tensors.
        first_tokens: int [b], the first token of each request that is visible to windows; None: all are.
    """

    spans: tuple[tuple[int, int], ...]
    window: int
    limits: WorkspaceLimits
    device: torch.device
    first_tokens: torch.Tensor | None = None
    _plans: dict[tuple[int, int | None], tuple[WorkspaceChunk, ...]] = field(default_factory=dict)

    def plan(self, ratio: int, topk: int | None) -> tuple[WorkspaceChunk, ...]:
        """The chunks of layers with groups of ``ratio`` tokens (0: none), ``topk`` of them selected (None: all)."""
        if (ratio, topk) not in self._plans:
            packed = _pack_spans(list(self._split_spans(ratio, topk)), ratio, topk, self.window, self.limits)
            self._plans[ratio, topk] = tuple(
                self._chunk(spans, ratio, visible=None if number else []) for number, spans in enumerate(packed)
            )
        return self._plans[ratio, topk]

    def _split_spans(self, ratio: int, topk: int | None) -> Iterator[_Span]:
        """The spans that attend over a workspace, split by ``max_indices``."""
        first = 0
        for request, (begin, end) in enumerate(self.spans):
            whole = _Span(request, first, begin, end)
            first += whole.queries
            rows = _rows(whole, ratio, self.window)
            if whole.queries < self.limits.min_queries or rows > self.limits.max_rows_per_query * whole.queries:
                continue
            if rows > self.limits.max_rows:
                continue
            count = max(self.limits.max_indices // _width(whole, ratio, topk, self.window), 1)
            for start in range(begin, end, count):
                yield _Span(request, whole.first + start - begin, start, min(start + count, end))

    def _chunk(self, spans: Sequence[_Span], ratio: int, visible: list[VisibleRows] | None) -> WorkspaceChunk:
        starts = [span.first - spans[0].first for span in spans]
        ends = [span.end for span in spans]
        gathered = [_tokens(span, self.window) for span in spans]
        groups = [_groups(span, ratio) for span in spans]
        requests = [span.request for span in spans]
        queries = starts[-1] + spans[-1].queries
        count, group_rows = len(spans), max(groups)
        rows = group_rows + max(gathered)
        row_offsets = [index * rows for index in range(count)]
        # One host-to-device copy for each dtype.
        lengths = to_device([*starts, queries, *ends, *gathered], self.device, torch.int32)
        cu_queries, seq_lens, gather_lens = lengths.split((count + 1, count, count))
        begins = [end - tokens for end, tokens in zip(ends, gathered, strict=True)]
        window_rows = [first + group_rows for first in row_offsets]
        columns = to_device([row_offsets, [0] * count, groups, window_rows, begins, ends, requests], self.device)
        window = Gathered(*columns[3:6])
        if self.first_tokens is not None:
            gather_lens = gather_lens.minimum(seq_lens - self.first_tokens[columns[6]]).clamp_min(0)
            window = window._replace(starts=window.ends - gather_lens)
        rows_of_tables = range(requests[0], requests[0] + count)
        first = spans[0].first
        return WorkspaceChunk(
            slice(first, first + queries),
            slice(rows_of_tables.start, rows_of_tables.stop) if requests == list(rows_of_tables) else columns[6],
            cu_queries,
            seq_lens,
            gather_lens,
            Gathered(*columns[:3]),
            window,
            group_rows,
            rows,
            visible,
        )


def paged_slices(chunks: Sequence[WorkspaceChunk], tokens: int) -> Iterator[slice]:
    """The slices of a step's tokens that are in no chunk."""
    begin = 0
    for chunk in chunks:
        if begin < chunk.tokens.start:
            yield slice(begin, chunk.tokens.start)
        begin = chunk.tokens.stop
    if begin < tokens:
        yield slice(begin, tokens)


def _pack_spans(
    parts: Sequence[_Span], ratio: int, topk: int | None, window: int, limits: WorkspaceLimits
) -> Iterator[list[_Span]]:
    """Group consecutive spans that fit a workspace together."""
    packed: list[_Span] = []
    for part in parts:
        together = [*packed, part]
        adjoins = not packed or packed[-1].first + packed[-1].queries == part.first
        rows = max(_groups(span, ratio) for span in together) + max(_tokens(span, window) for span in together)
        width = max(_width(span, ratio, topk, window) for span in together)
        indices = width * sum(span.queries for span in together)
        if packed and (not adjoins or len(together) * rows > limits.max_rows or indices > limits.max_indices):
            yield packed
            packed = []
        packed.append(part)
    if packed:
        yield packed


def _groups(span: _Span, ratio: int) -> int:
    return span.end // ratio if ratio else 0


def _tokens(span: _Span, window: int) -> int:
    """Number of tokens that the windows of a span reach."""
    return min(span.end, span.queries + window - 1)


def _rows(span: _Span, ratio: int, window: int) -> int:
    return _groups(span, ratio) + _tokens(span, window)


def _width(span: _Span, ratio: int, topk: int | None, window: int) -> int:
    """Maximum number of rows that a token of a span attends to."""
    groups = _groups(span, ratio)
    return window + (groups if topk is None else min(topk, groups))
