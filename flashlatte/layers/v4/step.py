"""A step of DeepSeek-V4's layers: its tokens, their slots, and the slots that they attend to."""

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
    """The groups of ``ratio`` tokens in a step.

    Attributes:
        table: int32 or int64 [b, columns], pages of groups.
        state_table: int32 or int64 [b, columns], pages of states (``compress``).
        page_size: groups in a page.
        slots: [T], slot of each token's group; -1 if it is not to be stored.
        num_visible: int32 [T], number of groups that each token may attend to.
        request_ids: [T], row of each token in the tables.
        backend: backend of ``all_slots``.
    """

    ratio: int
    table: torch.Tensor
    state_table: torch.Tensor
    page_size: int
    slots: torch.Tensor
    num_visible: torch.Tensor
    request_ids: torch.Tensor
    backend: str | None

    @property
    def all_slots(self) -> torch.Tensor:
        """int32 [T, columns · page_size], the slots of each token's visible groups, then -1.

        Computed on first use: it may be large, and layers with an indexer do not need it.
        """
        return self._cached("all_slots", self._all_slots)

    @property
    def token_table(self) -> torch.Tensor:
        """[T, columns], each token's row of ``table``, computed on first use."""
        last = self.table.shape[0] - 1
        return self._cached("token_table", lambda: self.table[self.request_ids.clamp(0, last)])

    def _all_slots(self) -> torch.Tensor:
        return index_convert(
            None,
            self.table,
            self.page_size,
            request_ids=self.request_ids,
            query_positions=self.num_visible - 1,
            sinks=self.table.shape[1] * self.page_size,
            backend=self.backend,
        )

    def _cached(self, name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        # functools.cached_property takes a lock before Python 3.12, which torch.compile cannot trace.
        cached: dict[str, tuple[torch.Tensor, bool]] = self.__dict__.setdefault("_cached_tensors", {})
        capturing = (
            self.slots.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()
        )
        # A tensor computed during capture has its value only in replays, so eager calls compute it again.
        if name not in cached or (cached[name][1] and not capturing):
            cached[name] = compute(), capturing
        return cached[name][0]

    @classmethod
    def build(
        cls,
        ratio: int,
        request_ids: torch.Tensor,
        positions: torch.Tensor,
        visible_until: torch.Tensor,
        table: torch.Tensor,
        state_table: torch.Tensor,
        page_size: int,
        backend: str | None,
    ) -> V4Groups:
        """Build the groups; a token attends to groups that end at position ``visible_until`` (int [T]) or before."""
        checks.positive_int("ratio", ratio)
        device = request_ids.device
        checks.tensor(f"group_tables[{ratio}][0]", table, ("b", "columns"), checks.INDEX_DTYPES, device)
        shape = (table.shape[0], "columns")
        checks.tensor(f"group_tables[{ratio}][1]", state_table, shape, checks.INDEX_DTYPES, device)
        num_visible = torch.div(visible_until + 1, ratio, rounding_mode="floor").clamp_min(0).to(torch.int32)
        own = torch.div(positions, ratio, rounding_mode="floor")
        slots = _slots(own, request_ids, table, page_size, backend)
        return cls(ratio, table, state_table, page_size, slots, num_visible, request_ids, backend)


@dataclass(frozen=True)
class V4Step:
    """Prefill and decode tokens of several requests, with their slots in the caches. All layers share it.

    Attributes:
        request_ids: int32 or int64 [T], row of each token in the tables; below 0 for padding. Tokens of a request are
            contiguous and in order.
        positions: int32 or int64 [T], position of each token in its request, which determines its slot.
        rotary_positions: int32 or int64 [T], positions for rotation and for the visibility of groups.
        window, page_size: tokens of the window, and tokens in a page of their cache.
        window_table: [b, columns], pages of tokens.
        slots: [T], slot of each token's key; -1 for none.
        window_slots: int32 [T, window], slots of each token's window; -1 for none.
        window_counts: int32 [T], length of the used prefix of ``window_slots``.
        groups: groups by ratio.
        max_length: upper bound of rotary positions, exclusive; None if the host does not know it.
        prefill: the requests that attend over a workspace; None: none.
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
    max_length: int | None = None
    prefill: V4Prefill | None = None

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @classmethod
    def from_spans(
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
        """Build a step from spans on the host; requests with many new tokens attend over a workspace.

        The plan is valid for this step only. Use ``build`` for a CUDA graph that is replayed for other steps.

        Args:
            spans: (first, end) positions of the new tokens of each row of ``window_table``; empty if they are equal.
            limits: which requests attend over a workspace; None: none.
            window_table, group_tables, window, page_size, group_page_sizes, rotary_positions, first_tokens,
                shared_tokens, backend: as for ``build``.

        Raises:
            TypeError, ValueError: as ``build``; a wrong number of spans, or a span that decreases or exceeds the
                capacity of the tables.
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
        ids_and_positions = to_device([ids, positions], device)
        step = cls.build(
            ids_and_positions[0],
            ids_and_positions[1],
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
        max_length = max((end for _, end in spans), default=0)
        step._check_capacity(max_length)
        if rotary_positions is None:
            step = replace(step, max_length=max_length)
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
        """Build a step from tensors, without synchronization, so that a CUDA graph may capture it.

        Args:
            request_ids, positions: int32 or int64 [T]. On a GPU, positions beyond the layer's ``rope`` are not
                detected, and are rotated as its last position.
            window_table: int32 or int64 [b, columns], pages of tokens from the request's first token on. Pages that no
                window reaches any more may be freed and replaced by -1.
            group_tables: for each ratio the pages of groups [b, columns] and of states [b, columns]. A short table of
                states is a ring buffer (``compress``).
            window: window of the layers.
            page_size: page size of the caches of tokens.
            group_page_sizes: page sizes of the caches of groups by ratio; default page_size. With page_size // ratio,
                one table can serve tokens and groups.
            rotary_positions: int32 or int64 [T], if they differ from ``positions``. A token never attends to groups
                that end after its own position.
            first_tokens: int32 or int64 [b], the first token of each request that is visible to windows; tokens before
                it are padding. Groups include padding, as in transformers.
            shared_tokens: int32 or int64 [b], number of leading tokens of each request whose keys and groups are
                cached already and may be read by others. For such a token only states are stored. A request can
                therefore start with the last tokens of a prefix, as many as the next group needs.
            backend: "portable" or "reference"; None selects one.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments. On
                the CPU also positions beyond the tables' capacity; on a GPU the keys of such tokens are not stored.
        """
        checks.indices("request_ids", request_ids, ("T",))
        tokens, device = request_ids.shape[0], request_ids.device
        checks.indices("positions", positions, (tokens,), device)
        checks.tensor("window_table", window_table, ("b", "columns"), checks.INDEX_DTYPES, device)
        requests = window_table.shape[0]
        window = checks.positive_int("window", window)
        is_valid = (request_ids >= 0) & (request_ids < requests)
        positions = positions.where(is_valid, -1)
        rotary = visible_until = positions
        if rotary_positions is not None:
            name, dtypes = "rotary_positions", checks.INDEX_DTYPES
            checks.tensor(name, rotary_positions, (tokens,), dtypes, device, unit_last_stride=False)
            rotary = rotary_positions.where(is_valid, -1)
            visible_until = rotary.minimum(positions)

        window_slots, window_counts = index_convert(
            None,
            window_table,
            page_size,
            request_ids=request_ids,
            query_positions=positions,
            window=window,
            # Masking by first_tokens below needs one column for each window position.
            compact=first_tokens is None,
            return_counts=True,
            backend=backend,
        )
        if first_tokens is not None:
            checks.tensor("first_tokens", first_tokens, (requests,), checks.INDEX_DTYPES, device)
            window_positions = positions.unsqueeze(1) - window + 1 + torch.arange(window, device=device)
            first = first_tokens[request_ids.clamp(0, requests - 1)].unsqueeze(1)
            window_slots = window_slots.masked_fill(window_positions < first, -1)
            window_counts = torch.full_like(window_counts, window)
        stored = positions
        if shared_tokens is not None:
            checks.tensor("shared_tokens", shared_tokens, (requests,), checks.INDEX_DTYPES, device)
            stored = positions.where(positions >= shared_tokens[request_ids.clamp(0, requests - 1)], -1)
        groups = {}
        for ratio, (table, state_table) in group_tables.items():
            if table.shape[0] != requests:
                raise ValueError(
                    f"group_tables[{ratio}][0] must have window_table's {requests} requests, got {table.shape[0]}"
                )
            rows = checks.positive_int(f"group_page_sizes[{ratio}]", (group_page_sizes or {}).get(ratio, page_size))
            groups[ratio] = V4Groups.build(ratio, request_ids, stored, visible_until, table, state_table, rows, backend)
        on_host = checks.has_values(positions)
        step = cls(
            request_ids,
            positions,
            rotary,
            window,
            page_size,
            window_table,
            _slots(stored, request_ids, window_table, page_size, backend),
            window_slots,
            window_counts,
            groups,
            int(rotary.max()) + 1 if on_host else None,
        )
        if on_host:
            step._check_capacity(int(positions.max()) + 1)
        return step

    def _check_capacity(self, tokens: int) -> None:
        """Raise ValueError if a request has more tokens than the tables can hold."""
        capacity = self.window_table.shape[1] * self.page_size
        if tokens > capacity:
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
    """The slots [T] of one position for each token."""
    found = index_convert(
        indices.unsqueeze(1), table, page_size, request_ids=request_ids, dtype=torch.int64, backend=backend
    )
    return found.squeeze(1)
