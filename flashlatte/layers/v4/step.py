"""A step of DeepSeek-V4's layers: its tokens, and where each layer finds what they attend to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flashlatte.layers.v4.workspace import DEFAULT_LIMITS, V4Prefill, WorkspaceLimits
from flashlatte.ops.index_convert import index_convert
from flashlatte.runtime import checks
from flashlatte.runtime.transfer import to_device


@dataclass(frozen=True)
class V4Groups:
    """The groups of ``ratio`` tokens, as the step's tokens see them.

    Attributes:
        table: int32 or int64 [b, columns], pages of groups.
        state_table: int32 or int64 [b, columns], pages of states (``compress``).
        page_size: of groups.
        slots: [T], the slot of the group that each token belongs to; -1 if it is not to be written.
        seen: int32 [T], how many groups each token sees.
        request_ids: [T], the row of each token in the tables.
        backend: of ``all_slots``.
    """

    ratio: int
    table: torch.Tensor
    state_table: torch.Tensor
    page_size: int
    slots: torch.Tensor
    seen: torch.Tensor
    request_ids: torch.Tensor
    backend: str | None

    @property
    def all_slots(self) -> torch.Tensor:
        """int32 [T, columns · page_size], the slots of all groups that each token sees, then -1.

        Made when first asked for: layers that select among groups have no use for it, and it may be large.
        """
        return self._kept("all_slots", self._all_slots)

    @property
    def token_table(self) -> torch.Tensor:
        """[T, columns], each token's row of ``table``. Made when first asked for."""
        last = self.table.shape[0] - 1
        return self._kept("token_table", lambda: self.table[self.request_ids.clamp(0, last)])

    def _all_slots(self) -> torch.Tensor:
        return index_convert(
            None,
            self.table,
            self.page_size,
            request_ids=self.request_ids,
            query_positions=self.seen - 1,
            sinks=self.table.shape[1] * self.page_size,
            backend=self.backend,
        )

    def _kept(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        # As functools.cached_property, in which torch.compile meets a lock before Python 3.12.
        kept: dict[str, tuple[torch.Tensor, bool]] = self.__dict__.setdefault("_made", {})
        capturing = (
            self.slots.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()
        )
        # What a graph makes is there when the graph has run, and not for whoever captured it.
        if name not in kept or (kept[name][1] and not capturing):
            kept[name] = make(), capturing
        return kept[name][0]

    @classmethod
    def build(
        cls,
        ratio: int,
        request_ids: torch.Tensor,
        positions: torch.Tensor,
        seeing: torch.Tensor,
        table: torch.Tensor,
        state_table: torch.Tensor,
        page_size: int,
        backend: str | None,
    ) -> V4Groups:
        """``seeing`` int [T]: a token sees the groups that end at this position of its request or before it."""
        checks.positive_int("ratio", ratio)
        device = request_ids.device
        checks.tensor(f"group_tables[{ratio}][0]", table, ("b", "columns"), checks.INDEX_DTYPES, device)
        shape = (table.shape[0], "columns")
        checks.tensor(f"group_tables[{ratio}][1]", state_table, shape, checks.INDEX_DTYPES, device)
        seen = torch.div(seeing + 1, ratio, rounding_mode="floor").clamp_min(0).to(torch.int32)
        own = torch.div(positions, ratio, rounding_mode="floor")
        slots = _slots(own, request_ids, table, page_size, backend)
        return cls(ratio, table, state_table, page_size, slots, seen, request_ids, backend)


@dataclass(frozen=True)
class V4Step:
    """Tokens of several requests, prefill and decode alike, and their places in the caches. All layers share it.

    Attributes:
        request_ids: int32 or int64 [T], the row of each token in the tables; below 0 for padding. Tokens of a request
            stand together, in order.
        positions: int32 or int64 [T], of each token in its request: its place in the caches.
        rotary_positions: int32 or int64 [T], by which it is rotated, and which groups it sees.
        window, page_size: tokens that a token sees, and tokens of a page in their cache.
        window_table: [b, columns], pages of tokens.
        slots: [T], where each token's key goes; -1 for none.
        window_slots: int32 [T, window], the slots of the tokens that each token sees; -1 for none.
        window_counts: int32 [T], after how many of them there are none.
        groups: by ratio.
        longest: all rotary positions are below it; None if the host does not know.
        prefill: which requests attend over a workspace. None: none of them.
    """

    request_ids: torch.Tensor
    positions: torch.Tensor
    rotary_positions: torch.Tensor
    window: int
    page_size: int
    window_table: torch.Tensor
    slots: torch.Tensor
    window_slots: torch.Tensor
    window_counts: torch.Tensor
    groups: Mapping[int, V4Groups]
    longest: int | None = None
    prefill: V4Prefill | None = None

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @classmethod
    def of_spans(
        cls,
        spans: Sequence[tuple[int, int]],
        window_table: torch.Tensor,
        group_tables: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        *,
        window: int = 128,
        page_size: int = 64,
        group_page_sizes: Mapping[int, int] | None = None,
        rotary_positions: torch.Tensor | None = None,
        first_tokens: torch.Tensor | None = None,
        shared_tokens: torch.Tensor | None = None,
        limits: WorkspaceLimits | None = DEFAULT_LIMITS,
        backend: str | None = None,
    ) -> V4Step:
        """The step of new tokens that the host knows, among which requests of many attend over a workspace.

        What is planned here are this step's tokens: a CUDA graph, which serves other steps, holds one of ``build``.

        Args:
            spans: for each row of ``window_table`` the positions of its request's new tokens, (first, end); none if
                the two are equal.
            limits: which requests attend over a workspace; None: none.
            window_table, group_tables, window, page_size, group_page_sizes, rotary_positions, first_tokens,
                shared_tokens, backend: as for ``build``.

        Raises:
            TypeError, ValueError: as ``build``; spans that are not of window_table's requests, run backwards, or end
                where the tables have no room.
        """
        checks.tensor("window_table", window_table, ("b", "columns"), checks.INDEX_DTYPES)
        device = window_table.device
        spans = tuple((operator.index(begin), operator.index(end)) for begin, end in spans)
        if len(spans) != window_table.shape[0]:
            raise ValueError(f"spans must be of window_table's {window_table.shape[0]} requests, got {len(spans)}")
        for begin, end in spans:
            if not 0 <= begin <= end:
                raise ValueError(f"spans must be (first, end) with 0 <= first <= end, got {(begin, end)}")
        ids = [request for request, (begin, end) in enumerate(spans) for _ in range(begin, end)]
        positions = [position for begin, end in spans for position in range(begin, end)]
        both = to_device([ids, positions], device)
        step = cls.build(
            both[0],
            both[1],
            window_table,
            group_tables,
            window=window,
            page_size=page_size,
            group_page_sizes=group_page_sizes,
            rotary_positions=rotary_positions,
            first_tokens=first_tokens,
            shared_tokens=shared_tokens,
            backend=backend,
        )
        longest = max((end for _, end in spans), default=0)
        step._check_room(longest)
        if rotary_positions is None:
            step = replace(step, longest=longest)
        if limits is None:
            return step
        return replace(step, prefill=V4Prefill(spans, window, limits, device, first_tokens))

    @classmethod
    def build(
        cls,
        request_ids: torch.Tensor,
        positions: torch.Tensor,
        window_table: torch.Tensor,
        group_tables: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        *,
        window: int = 128,
        page_size: int = 64,
        group_page_sizes: Mapping[int, int] | None = None,
        rotary_positions: torch.Tensor | None = None,
        first_tokens: torch.Tensor | None = None,
        shared_tokens: torch.Tensor | None = None,
        backend: str | None = None,
    ) -> V4Step:
        """The step of these tokens. Nothing is read from the device, so that a CUDA graph may hold it.

        Args:
            request_ids, positions: int32 or int64 [T]. On a GPU nobody sees that a position is beyond what a layer's
                ``rope`` can rotate by: it is rotated by the last one.
            window_table: int32 or int64 [b, columns], pages of tokens, from each request's first on. A page that no
                window reaches any more may be given back, and -1 put in its place.
            group_tables: for each ratio pages of groups [b, columns] and of states [b, columns]. A short table of
                states is a ring (``compress``).
            window: of the layers.
            page_size: of caches of tokens.
            group_page_sizes: of caches of groups, by ratio; page_size where there is none. With page_size // ratio one
                table can be that of tokens and of groups.
            rotary_positions: int32 or int64 [T], where they are others than ``positions``. A token sees no group that
                ends after its own position, whatever they are.
            first_tokens: int32 or int64 [b], the first token of each request that windows see: those before it are
                padding. Groups are made of padding too, as in transformers.
            shared_tokens: int32 or int64 [b], how many of each request's first tokens have their keys and groups in the
                caches already, where others may read them. Such a token leaves states and nothing else, so that a
                request may begin with a prefix's last tokens, as many as the next group is made of.
            backend: "portable" or "reference"; None chooses.

        Raises:
            TypeError, ValueError: arguments of a wrong type, dtype, shape or device, or that contradict each other. On
                the CPU also positions that the tables have no room for; on a GPU the keys of such tokens go nowhere.
        """
        checks.tensor("request_ids", request_ids, ("T",), checks.INDEX_DTYPES, unit_last_stride=False)
        tokens, device = request_ids.shape[0], request_ids.device
        checks.tensor("positions", positions, (tokens,), checks.INDEX_DTYPES, device, unit_last_stride=False)
        checks.tensor("window_table", window_table, ("b", "columns"), checks.INDEX_DTYPES, device)
        requests = window_table.shape[0]
        window = checks.positive_int("window", window)
        known = (request_ids >= 0) & (request_ids < requests)
        positions = positions.where(known, -1)
        turned_by = seeing = positions
        if rotary_positions is not None:
            name, dtypes = "rotary_positions", checks.INDEX_DTYPES
            checks.tensor(name, rotary_positions, (tokens,), dtypes, device, unit_last_stride=False)
            turned_by = rotary_positions.where(known, -1)
            seeing = turned_by.minimum(positions)

        window_slots, window_counts = index_convert(
            None,
            window_table,
            page_size,
            request_ids=request_ids,
            query_positions=positions,
            window=window,
            # Hidden tokens leave gaps.
            compact=first_tokens is None,
            return_counts=True,
            backend=backend,
        )
        if first_tokens is not None:
            checks.tensor("first_tokens", first_tokens, (requests,), checks.INDEX_DTYPES, device)
            seen_from = positions.unsqueeze(1) - window + 1 + torch.arange(window, device=device)
            first = first_tokens[request_ids.clamp(0, requests - 1)].unsqueeze(1)
            window_slots = window_slots.masked_fill(seen_from < first, -1)
            window_counts = torch.full_like(window_counts, window)
        written = positions
        if shared_tokens is not None:
            checks.tensor("shared_tokens", shared_tokens, (requests,), checks.INDEX_DTYPES, device)
            written = positions.where(positions >= shared_tokens[request_ids.clamp(0, requests - 1)], -1)
        groups = {}
        for ratio, (table, state_table) in group_tables.items():
            if table.shape[0] != requests:
                raise ValueError(
                    f"group_tables[{ratio}][0] must have window_table's {requests} requests, got {table.shape[0]}"
                )
            rows = checks.positive_int(f"group_page_sizes[{ratio}]", (group_page_sizes or {}).get(ratio, page_size))
            groups[ratio] = V4Groups.build(ratio, request_ids, written, seeing, table, state_table, rows, backend)
        readable = checks.has_values(positions)
        step = cls(
            request_ids,
            positions,
            turned_by,
            window,
            page_size,
            window_table,
            _slots(written, request_ids, window_table, page_size, backend),
            window_slots,
            window_counts,
            groups,
            int(turned_by.max()) + 1 if readable else None,
        )
        if readable:
            step._check_room(int(positions.max()) + 1)
        return step

    def _check_room(self, tokens: int) -> None:
        """Raise ValueError for more tokens of a request than the tables lead to, whose keys would be nowhere."""
        room = self.window_table.shape[1] * self.page_size
        if tokens > room:
            raise ValueError(
                f"window_table must have room for {tokens} tokens of a request, got {self.window_table.shape[1]} pages "
                f"of {self.page_size}"
            )
        for ratio, groups in self.groups.items():
            if tokens // ratio > groups.table.shape[1] * groups.page_size:
                raise ValueError(
                    f"group_tables[{ratio}][0] must have room for {tokens // ratio} groups of a request, got "
                    f"{groups.table.shape[1]} pages of {groups.page_size}"
                )


def _slots(
    indices: torch.Tensor, request_ids: torch.Tensor, table: torch.Tensor, page_size: int, backend: str | None
) -> torch.Tensor:
    """The slots [T] of one position a token."""
    found = index_convert(
        indices.unsqueeze(1), table, page_size, request_ids=request_ids, dtype=torch.int64, backend=backend
    )
    return found.squeeze(1)
