"""A simple model of the cache and of a language model, for testing the scheduler."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from flashlatte.engine.pages import PagePool
from flashlatte.engine.request import ZERO_STATES, Request, ScheduledRequest, Step
from flashlatte.engine.scheduler import Scheduler
from flashlatte.engine.states import NoStates, StateSlots

EMPTY = None
NO_TOKENS = "", []


def next_token(tokens: Sequence[int]) -> int:
    """The model's next token: a function of all earlier tokens, with few values, so that prefixes repeat."""
    return hashlib.sha256(bytes(token % 251 for token in tokens)).digest()[0] % 3


class Machine:
    """Runs steps, and checks that all earlier tokens of a computed token are in the request's pages."""

    def __init__(self, pages: int, page_size: int, swap_space: int, **limits: Any) -> None:
        self.size = page_size
        self.pool = PagePool(pages, page_size)
        self.host = PagePool(swap_space, page_size) if swap_space else None
        self.scheduler = Scheduler(self.pool, host_pool=self.host, **limits)
        self.device_memory: list[list[Any]] = [[EMPTY] * page_size for _ in range(pages)]
        self.host_memory: list[list[Any]] = [[EMPTY] * page_size for _ in range(swap_space)]
        # The tokens, with their salt, that are included in the states of a slot.
        self.states: list[Any] = [NO_TOKENS, *[EMPTY] * 100]
        self.host_states: list[Any] = [EMPTY] * 100
        self.in_flight: list[tuple[Step, dict[str, list[int]]]] = []
        self.known: dict[str, list[int]] = {}
        self.ended: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.known[request.id] = list(request.prompt)

    def run_step(self) -> bool:
        """Schedule a step and compute it; ``update`` follows later. False if there was none."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        assert (
            sum(one.count for one in step.scheduled)
            == self.scheduler.max_num_batched_tokens - step.token_budget
            <= self.scheduler.max_num_batched_tokens
        )
        if self.scheduler.batch_invariant and any(one.count > 1 for one in step.scheduled):
            assert len(step.scheduled) == 1
        for source, target in step.swap_out:
            self.host_memory[target] = list(self.device_memory[source])
        for source, target in step.swap_in:
            self.device_memory[target] = list(self.host_memory[source])
        for source, target in step.state_swap_out:
            self.host_states[target] = self.states[source]
        for source, target in step.state_swap_in:
            self.states[target] = self.host_states[source]
        copied = [(target, self.states[source]) for source, target in step.state_copies]
        for target, state in copied:
            assert target != ZERO_STATES
            self.states[target] = state
        written: set[tuple[int, int]] = set()
        self.in_flight.append((step, {}))
        for one in step.scheduled:
            if not one.request.finished:
                self._compute(one, written)
        return True

    def _compute(self, one: ScheduledRequest, written: set[tuple[int, int]]) -> None:
        request = one.request
        tokens = self.known[request.id]
        length = one.start + one.count - one.num_drafts
        assert length <= len(tokens)
        # A token of a step in flight is on the device only, where it can be the only input of the next step.
        assert length <= len(request.tokens) or one.count == 1
        for position in range(one.start):
            assert self._at(request, position) == (request.cache_salt, tokens[: position + 1])
        inputs = [*tokens[:length], *request.draft_tokens[: one.num_drafts]]
        for position in range(one.start, one.start + one.count):
            if position < request.num_shared_tokens:
                # Recomputed, but not written, since other requests may read it.
                assert self._at(request, position) == (request.cache_salt, inputs[: position + 1])
                continue
            place = request.pages[position // self.size], position % self.size
            assert place not in written
            assert self.pool.references(place[0]) == 1
            written.add(place)
            self.device_memory[place[0]][place[1]] = (request.cache_salt, inputs[: position + 1])
        self._compute_states(one, inputs, written)
        if not one.samples:
            return
        new = [next_token(tokens[:length])]
        for draft in request.draft_tokens[: one.num_drafts]:
            if draft != new[-1]:
                break
            new.append(next_token([*tokens[:length], *new]))
        self.known[request.id] = [*tokens[:length], *new]
        self.in_flight[-1][1][request.id] = new

    def _compute_states(self, one: ScheduledRequest, inputs: list[int], written: set[tuple[int, int]]) -> None:
        """Check that the request's states include all earlier tokens, and add the new ones."""
        if type(self.scheduler.states) is NoStates:
            assert not one.snapshots
            return
        salt, slot = one.request.cache_salt, one.request.states.slot
        assert self.states[slot] == ((salt, inputs[: one.start]) if one.start else NO_TOKENS)
        for tokens, target in (*one.snapshots, (one.count, slot)):
            assert target != ZERO_STATES
            assert (-1, target) not in written
            written.add((-1, target))
            self.states[target] = salt, inputs[: one.start + tokens]

    def _at(self, request: Request, position: int) -> Any:
        return self.device_memory[request.pages[position // self.size]][position % self.size]

    def update(self, stopped: Sequence[str] = ()) -> None:
        """Pass the results of the oldest step in flight to the scheduler."""
        step, tokens = self.in_flight.pop(0)
        for request in self.scheduler.update(step, tokens, stopped):
            self.ended[request.id] = request
        for one in step.scheduled:
            one.request.draft_tokens = []

    def finish(self, most_steps: int = 10_000) -> None:
        """Run until nothing is left."""
        for _ in range(most_steps):
            if not len(self.scheduler):
                return
            if not self.run_step():
                assert self.in_flight, "requests are left, and no step could be made for them"
            while self.in_flight:
                self.update()
        raise AssertionError(f"{len(self.scheduler)} requests are left after {most_steps} steps")

    def check_pages(self) -> None:
        """Check that no page is leaked, and that reference counts match the requests that hold the pages."""
        holders: dict[int, int] = {}
        for request in (*self.scheduler._running, *self.scheduler._waiting):
            for page in request.pages:
                holders[page] = holders.get(page, 0) + 1
        assert {page: self.pool.references(page) for page in holders} == holders
        assert self.pool.in_use == len(holders)
        if self.host is not None:
            held = [page for request in self.scheduler._waiting for page in request.host_pages]
            assert len(held) == len(set(held)) == self.host.in_use
        if isinstance(slots := self.scheduler.states, StateSlots):
            self._check_states(slots)

    def _check_states(self, slots: StateSlots) -> None:
        running = [request.states for request in self.scheduler._running]
        waiting = [request.states for request in self.scheduler._waiting]
        assert all(states.slot == ZERO_STATES and not states.taken for states in waiting)
        held = [states.slot for states in running] + [slot for states in running for slot in states.taken.values()]
        held += slots._snapshots.values()
        assert len({*held, ZERO_STATES}) == 1 + len(held)
        swapped = [states.host_slot for states in waiting if states.host_slot >= 0]
        assert len(set(swapped)) == len(swapped)
        assert slots.in_use == len(held) - len(slots._snapshots) + len(swapped)


def run_long(machine: type[RuleBasedStateMachine], steps: int, examples: int) -> None:
    """Run a state machine for at least ``steps`` steps in total, in ``examples`` long examples."""
    done = 0

    class Counted(machine):
        @invariant()
        def counted(self) -> None:
            nonlocal done
            done += 1

    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    long = settings(max_examples=examples, stateful_step_count=250, suppress_health_check=slow)
    run_state_machine_as_test(Counted, settings=long)
    assert done >= steps
