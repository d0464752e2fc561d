"""Slots of the states of linear attention, for running requests, swapped-out requests and snapshots. Integers only.

A layer of linear attention has a state of fixed size for each request, instead of a row for each token. The states of
all such layers share one slot number. The state after a token cannot be derived from that of a later token, so the
prefix cache can end only where a snapshot of the states was taken: after a full page, under the hash of this page.

Snapshots are taken where a later request is most likely to continue: after the last full page of the tokens that are
known when a request starts, after the last page that it has in common with an earlier request, and after each page that
it generates, of which only the latest snapshot stays. The snapshot that was not used for longest is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from flashlatte.engine.request import ZERO_STATES, Request, Step


class NoStates:
    """The interface of ``StateSlots``, for models whose layers all have rows in pages."""

    def usable_pages(self, request: Request, keys: Sequence[bytes]) -> int:
        """Number of leading pages of a cached prefix from which a request can start.

        Args:
            keys: hashes of the pages.
        """
        return len(keys)

    def start(self, request: Request, step: Step) -> None:
        """Assign a slot to a request that starts or is swapped in, and add the copy of its first states to the step."""

    def can_swap_out(self) -> bool:
        """Whether the host has a slot."""
        return True

    def swap_out(self, request: Request, step: Step) -> None:
        """Move the states of a request to the host."""

    def take_snapshots(self, request: Request, begin: int, end: int) -> list[tuple[int, int]]:
        """Snapshots to take while a request's tokens ``begin`` to ``end`` are computed: (tokens from begin, slot)."""
        return []

    def register(self, request: Request, border: int, key: bytes) -> None:
        """Make the snapshot after a request's first ``border`` tokens available, under the hash of their last page."""

    def unregister(self, request: Request) -> None:
        """Drop the snapshots of a request because their contents are wrong."""

    def release(self, request: Request) -> None:
        """Free the slots of a request. Its registered snapshots stay."""

    def release_all(self) -> None:
        """Free the slots of all requests, also after an interrupted change. Registered snapshots stay."""


class StateSlots(NoStates):
    """The slots of the device and of the host. Slot ``ZERO_STATES`` of the device holds zeros, and is never written.

    Args:
        page_size: tokens in a page.
        num_requests: requests that run at a time.
        num_snapshots: snapshots for the prefix cache.
        num_host: requests whose states are on the host at a time.
    """

    def __init__(self, page_size: int, num_requests: int, num_snapshots: int = 0, num_host: int = 0) -> None:
        self._page_size = page_size
        first = ZERO_STATES + 1 + num_requests
        self._of_requests, self._of_snapshots = range(ZERO_STATES + 1, first), range(first, first + num_snapshots)
        self._of_host = range(num_host)
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.release_all()

    @property
    def in_use(self) -> int:
        """Number of slots of requests, on device and host, and of snapshots that are not registered."""
        snapshots = len(self._of_snapshots) - len(self._snapshots) - len(self._free_snapshots)
        return len(self._of_requests) - len(self._free) + len(self._of_host) - len(self._free_host) + snapshots

    def usable_pages(self, request: Request, keys: Sequence[bytes]) -> int:
        states = request.states
        states.source, states.num_matched_tokens = ZERO_STATES, len(keys) * self._page_size
        for count in range(len(keys), 0, -1):
            if (slot := self._snapshots.get(keys[count - 1])) is not None:
                self._snapshots.move_to_end(keys[count - 1])
                states.source = slot
                return count
        return 0

    def start(self, request: Request, step: Step) -> None:
        states = request.states
        states.slot = self._free.pop()
        if states.host_slot >= 0:
            step.state_swap_in.append((states.host_slot, states.slot))
            self._free_host.append(states.host_slot)
            states.host_slot = -1
        else:
            step.state_copies.append((states.source, states.slot))
            states.last_known_border = (request.length - 1) // self._page_size * self._page_size

    def can_swap_out(self) -> bool:
        return bool(self._free_host)

    def swap_out(self, request: Request, step: Step) -> None:
        request.states.host_slot = self._free_host.pop()
        step.state_swap_out.append((request.states.slot, request.states.host_slot))
        self._release_device(request)

    def take_snapshots(self, request: Request, begin: int, end: int) -> list[tuple[int, int]]:
        states, taken = request.states, []
        for border in range((begin // self._page_size + 1) * self._page_size, end + 1, self._page_size):
            wanted = border == states.num_matched_tokens or border >= states.last_known_border
            if wanted and (slot := self._allocate_snapshot()) is not None:
                states.taken[border] = slot
                taken.append((border - begin, slot))
        return taken

    def register(self, request: Request, border: int, key: bytes) -> None:
        states = request.states
        if (slot := states.taken.pop(border, None)) is None:
            return
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            self._free_snapshots.append(slot)
            return
        self._snapshots[key] = slot
        states.keys.append(key)
        if border > states.last_known_border:
            if states.generated is not None:
                self._drop(states.generated)
                states.keys.remove(states.generated)
            states.generated = key

    def unregister(self, request: Request) -> None:
        for key in request.states.keys:
            self._drop(key)

    def release(self, request: Request) -> None:
        if request.states.host_slot >= 0:
            self._free_host.append(request.states.host_slot)
            request.states.host_slot = -1
        if request.states.slot != ZERO_STATES:
            self._release_device(request)

    def release_all(self) -> None:
        self._free, self._free_host = list(self._of_requests), list(self._of_host)
        self._free_snapshots = sorted({*self._of_snapshots}.difference(self._snapshots.values()))

    def _release_device(self, request: Request) -> None:
        self._free.append(request.states.slot)
        self._free_snapshots += request.states.taken.values()
        request.states.slot, request.states.taken = ZERO_STATES, {}

    def _allocate_snapshot(self) -> int | None:
        """A free slot, or that of the least recently used snapshot; None if all are in use for steps in flight."""
        if self._free_snapshots:
            return self._free_snapshots.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None

    def _drop(self, key: bytes) -> None:
        if (slot := self._snapshots.pop(key, None)) is not None:
            self._free_snapshots.append(slot)
