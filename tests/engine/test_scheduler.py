"""The scheduler on a simple model of a cache: all earlier tokens are in the cache when a token is computed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engine_machine import Machine, next_token, run_long

from flashlatte.engine.pages import PagePool
from flashlatte.engine.request import Request
from flashlatte.engine.scheduler import Scheduler
from flashlatte.engine.states import NoStates, StateSlots


def generated_alone(prompt, max_new_tokens):
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def generated(request):
    return request.tokens[len(request.prompt) :]


def run(requests, pages=8, page_size=4, swap_space=0, **limits):
    machine = Machine(pages, page_size, swap_space, **limits)
    for request in requests:
        machine.add(request)
    machine.finish()
    for request in requests:
        assert generated(request) == generated_alone(request.prompt, request.max_tokens)
    machine.check_pages()
    assert machine.pool.in_use == 0
    return machine


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_every_chunk_size_gives_the_same_tokens(chunk):
    run([Request(f"r{i}", [1] * (5 + 3 * i), 6) for i in range(4)], pages=32, max_num_batched_tokens=chunk)


def test_requests_with_a_common_prefix_share_pages_once():
    prompt = [1, 2] * 8
    machine = Machine(16, 4, 0)
    first, second = Request("a", prompt, 2), Request("b", [*prompt, 5], 2)
    machine.add(first)
    machine.finish()
    machine.add(second)
    assert machine.run_step()
    assert second.num_cached_tokens == 16
    assert machine.pool.in_use == 5
    third = Request("c", [*prompt, 6], 2)
    machine.add(third)
    assert machine.run_step()
    assert machine.pool.in_use == 6
    machine.finish()


def test_the_end_of_a_shared_prefix_is_recomputed():
    machine = Machine(16, 4, 0, prefix_overlap=3)
    prompt = [1, 2] * 8
    for request in (Request("a", prompt, 2), Request("b", [*prompt, 5], 2)):
        machine.add(request)
        assert machine.run_step()
        machine.finish()
    assert request.num_shared_tokens == 16
    assert request.num_cached_tokens == 13


def test_tokens_cached_after_preemption_are_not_counted_as_cached_prompt():
    requests = [Request("a", [1, 1], 10), Request("b", [2, 2], 10)]
    machine = run(requests, pages=8, page_size=2)
    assert machine.scheduler.statistics.recomputed > 0
    assert machine.scheduler.statistics.cached_tokens > 2
    assert [request.num_cached_tokens for request in requests] == [0, 0]


def test_other_salts_share_nothing():
    machine = run([Request("a", [1] * 9, 1, cache_salt="x")], pages=8)
    other = Request("b", [1] * 9, 1, cache_salt="y")
    machine.add(other)
    machine.finish()
    assert other.num_cached_tokens == 0


@pytest.mark.parametrize("swap_space", [0, 3, 16])
def test_a_pool_too_small_for_all_requests_completes_all(swap_space):
    requests = [Request(f"r{i}", [i] * 7, 12) for i in range(5)]
    machine = run(requests, pages=6, swap_space=swap_space, enable_prefix_caching=False)
    statistics = machine.scheduler.statistics
    assert statistics.swapped + statistics.recomputed > 0
    assert (statistics.swapped > 0) == (swap_space > 0)


def test_requests_in_a_step_keep_their_pages():
    machine = Machine(6, 1, 0, max_num_batched_tokens=3, enable_prefix_caching=False)
    machine.add(Request("first", [1], 5))
    machine.run_step()
    machine.update()
    urgent = Request("urgent", [2] * 5, 1, priority=-1)
    machine.add(urgent)
    machine.finish()
    assert list(machine.ended) == ["urgent", "first"]
    assert machine.scheduler.statistics.recomputed == 1


def test_a_preempted_request_waits_for_its_token_in_flight():
    machine = Machine(4, 1, 0, max_num_batched_tokens=8, enable_prefix_caching=False)
    machine.add(Request("later", [1], 4))
    machine.run_step()
    machine.update()
    machine.add(Request("urgent", [2], 4, priority=-1))
    for _ in range(20):
        if not machine.run_step() or len(machine.in_flight) > 1:
            machine.update()
        if not machine.scheduler:
            break
    assert list(machine.ended) == ["urgent", "later"]
    assert machine.scheduler.statistics.recomputed > 0


def test_a_lower_priority_runs_first():
    machine = Machine(8, 4, 0, max_num_seqs=1)
    usual, urgent = Request("usual", [1] * 4, 2), Request("urgent", [2] * 4, 2, priority=-1)
    for request in (Request("running", [3] * 4, 2), usual, urgent):
        machine.add(request)
    machine.finish()
    assert list(machine.ended) == ["urgent", "running", "usual"]


def test_waiting_requests_are_not_starved_by_urgent_ones():
    machine = Machine(4, 4, 0, max_num_seqs=1, starvation_limit=3)
    machine.add(Request("patient", [1] * 4, 2))
    for number in range(40):
        machine.add(Request(f"urgent{number}", [2] * 4, 2, priority=-1))
        machine.run_step()
        while machine.in_flight:
            machine.update()
    assert "patient" in machine.ended


@pytest.mark.parametrize("swap_space", [0, 8])
def test_batch_invariant_chunks_of_a_request_do_not_depend_on_others(swap_space):
    """The prompt in separate chunks of 4, then token by token, whatever other requests are added or preempted."""
    requests = [Request(f"r{i}", [1] * (3 + 4 * i), 6) for i in range(4)]
    machine = Machine(11, 2, swap_space, max_num_batched_tokens=4, enable_prefix_caching=False, batch_invariant=True)
    for request in requests:
        machine.add(request)
    while machine.scheduler:
        ran = machine.run_step()
        work = machine.in_flight[-1][0].scheduled if ran else []
        for one in work:
            prompt = len(one.request.prompt)
            assert one.start % 4 == 0 or one.start >= prompt
            assert one.count == (min(4, prompt - one.start) if one.start < prompt else 1)
        if not ran or len(machine.in_flight) > 1:
            machine.update()
    for request in requests:
        assert generated(request) == generated_alone(request.prompt, 6)
    statistics = machine.scheduler.statistics
    assert (statistics.swapped if swap_space else statistics.recomputed) > 0


def test_batch_invariant_requests_share_only_whole_chunks():
    """Chunks of four: two are shared by the third prompt; for the last prompt one token must remain to be computed."""
    machine = Machine(40, 2, 0, max_num_batched_tokens=4, batch_invariant=True)
    seen = []
    for length in (7, 11, 11, 8):
        request = Request(f"of {length}", [1] * length, 6)
        machine.add(request)
        machine.finish()
        seen.append((request.num_cached_tokens, 2 * len(machine.pool.match([1] * 40))))
    assert seen == [(0, 4), (4, 8), (8, 8), (4, 8)]


def serve_one(machine, name, prompt, new=1):
    """Run a single request; returns its number of tokens from the prefix cache."""
    request = Request(name, prompt, new)
    machine.add(request)
    machine.finish()
    assert generated(request) == generated_alone(prompt, new)
    machine.check_pages()
    assert machine.pool.in_use == machine.scheduler.states.in_use == 0
    return request.num_cached_tokens


@pytest.mark.parametrize("max_num_batched_tokens", [64, 5])
def test_a_prefix_is_shared_up_to_a_snapshot(max_num_batched_tokens):
    """Pages of 4 tokens: there is a snapshot after 16 of 19 tokens, and after 12 only once two requests diverge
    there."""
    machine = Machine(40, 4, 0, num_snapshots=8, max_num_batched_tokens=max_num_batched_tokens)
    prompt = [1, 2] * 9 + [3]
    assert serve_one(machine, "first", prompt) == 0
    assert serve_one(machine, "same", prompt) == 16
    assert serve_one(machine, "longer", [*prompt, *[5] * 9]) == 16
    parts = [[*prompt[:14], token, *[token] * 9] for token in (6, 7, 8)]
    assert [serve_one(machine, f"parts{one[14]}", one) for one in parts] == [0, 12, 12]
    assert serve_one(machine, "longest", [*prompt, *[5] * 12]) == 28


def test_generated_tokens_keep_their_last_snapshot():
    machine = Machine(40, 4, 0, num_snapshots=8)
    prompt = [1, 2, 3, 4, 5]
    serve_one(machine, "first", prompt, new=12)
    assert isinstance(machine.scheduler.states, StateSlots)
    assert len(machine.scheduler.states._snapshots) == 2
    answered = [*prompt, *generated_alone(prompt, 12)]
    assert serve_one(machine, "continued", [*answered, 9]) == 16
    assert serve_one(machine, "again", [*prompt, 9]) == 4


def test_the_least_recently_used_snapshot_is_evicted():
    machine = Machine(40, 4, 0, num_snapshots=2)
    one, two, three = ([token] * 6 for token in (1, 2, 3))
    cached = [serve_one(machine, f"r{n}", prompt) for n, prompt in enumerate((one, two, one, three, one, two))]
    assert cached == [0, 0, 4, 0, 4, 0]


def test_without_a_slot_on_the_host_a_request_is_recomputed():
    machine = Machine(6, 4, 8, max_num_seqs=4, num_snapshots=0, enable_prefix_caching=False)
    slots = machine.scheduler.states
    assert isinstance(slots, StateSlots)
    slots._free_host = []
    for number in range(4):
        machine.add(Request(f"r{number}", [number] * 7, 12))
    for _ in range(20):
        machine.run_step()
        machine.update()
    assert machine.scheduler.statistics.recomputed > 0
    assert machine.scheduler.statistics.swapped == 0


def test_errors_name_the_argument():
    scheduler = Scheduler(PagePool(2, 4))
    scheduler.add(Request("a", [1], 1))
    with pytest.raises(ValueError, match=r"request_id must be unique among unfinished requests, got 'a' again"):
        scheduler.add(Request("a", [1], 1))
    with pytest.raises(ValueError, match=r"must fit the cache, got 9 tokens, and it holds 8: 2 pages of 4"):
        scheduler.add(Request("b", [1] * 5, 5))
    with pytest.raises(ValueError, match="prompt of request 'c' must have at least one token"):
        Request("c", [], 1)


class Serving(RuleBasedStateMachine):
    """Any order of arrivals, steps, late updates, drafts, stops and aborts."""

    @initialize(
        pages=st.integers(2, 10),
        page_size=st.integers(1, 4),
        swap_space=st.integers(0, 8),
        max_num_batched_tokens=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        enable_prefix_caching=st.booleans(),
        prefix_overlap=st.sampled_from([0, 1, 5]),
        batch_invariant=st.booleans(),
        num_snapshots=st.sampled_from([None, 0, 1, 3, 20]),
    )
    def start(self, pages, page_size, swap_space, prefix_overlap, batch_invariant, num_snapshots, **limits):
        limits |= {"batch_invariant": batch_invariant, "prefix_overlap": 0 if batch_invariant else prefix_overlap}
        if num_snapshots is not None:
            limits |= {"num_snapshots": num_snapshots, "batch_invariant": False, "prefix_overlap": 0}
        self.machine = Machine(pages, page_size, swap_space, **limits)
        self.requests = {}
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        new=st.integers(1, 8),
        priority=st.integers(-2, 2),
        cache_salt=st.sampled_from(["", "other"]),
    )
    def add(self, prompt, new, priority, cache_salt):
        room = self.machine.pool.num_pages * self.machine.size
        request = Request(f"r{self.count}", prompt[:room], 1, priority=priority, cache_salt=cache_salt)
        request.max_tokens = min(new, room + 1 - len(request.prompt))
        self.count += 1
        self.requests[request.id] = request
        self.machine.add(request)

    @rule()
    def step(self):
        if len(self.machine.in_flight) < 2:
            self.machine.run_step()

    @rule(guesses=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def draft(self, guesses):
        scheduler = self.machine.scheduler
        rolls_back = type(scheduler.states) is NoStates and not scheduler.batch_invariant
        if not self.machine.in_flight and rolls_back:
            for request in self.requests.values():
                request.draft_tokens = list(guesses)

    @precondition(lambda self: self.machine.in_flight)
    @rule(stop=st.booleans())
    def update(self, stop):
        ids = [work.request.id for work in self.machine.in_flight[0][0].scheduled if work.samples]
        stopped = ids[:1] if stop else []
        self.machine.update(stopped)
        for name in stopped:
            self.requests.pop(name, None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[name]
        self.machine.scheduler.abort(name)

    @invariant()
    def pages_are_held_by_who_references_them(self):
        if hasattr(self, "machine"):
            self.machine.check_pages()

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        while self.machine.in_flight:
            self.machine.update()
        self.machine.finish()
        self.machine.check_pages()
        assert self.machine.pool.in_use == 0
        for request in self.requests.values():
            assert generated(request) == generated_alone(request.prompt, request.max_tokens)


TestServing = Serving.TestCase
TestServing.settings = settings(stateful_step_count=60)


@pytest.mark.full
def test_a_hundred_thousand_steps():
    run_long(Serving, 100_000, examples=600)
