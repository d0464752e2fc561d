"""An interrupt at any line of the engine leaks no pages, and later requests get correct tokens."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from support.engine_models import greedy

from flashlatte.distributed.model.single_process import SingleProcess
from flashlatte.engine import (
    Engine,
    batch,
    engine,
    live_requests,
    outputs,
    pages,
    prompt_lookup,
    request,
    runner,
    scheduler,
    states,
)
from flashlatte.engine.batch import StepBatch
from flashlatte.engine.paged import PagedModel

VOCABULARY = 11
# Some have common prefixes, some repeat themselves.
PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [8, 9] * 4, [3]]
NEW = 5
PLANNING = (engine, live_requests, scheduler, pages, states)
ALL = (*PLANNING, batch, outputs, prompt_lookup, request, runner)
OPTIONS = [
    {"num_pages": 7, "swap_space": 4},
    {"num_pages": 7, "num_speculative_tokens": 2},
    {"num_pages": 7, "swap_space": 2, "max_num_batched_tokens": 3, "num_speculative_tokens": 1},
    {"num_pages": 40, "enable_prefix_caching": False, "max_num_seqs": 2},
    {"num_pages": 7, "swap_space": 4, "has_states": True},
]


def next_token(context: list[int]) -> int:
    return sum((7 * place + 3) * token for place, token in enumerate(context)) % VOCABULARY


Use = Callable[[Engine], None]


class Hashes(PagedModel):
    """A model whose next token is a function of the tokens in the request's pages."""

    vocabulary, max_position, dtype, device = VOCABULARY, 64, torch.float32, torch.device("cpu")
    config, name, eos_token_ids = None, "hashes", ()

    def __init__(self, has_states: bool = False) -> None:
        self.ranks, self.fails_at, self.calls, self.has_states = SingleProcess(), -1, 0, has_states

    def allocate(self, cache_format: str, num_pages: int, page_size: int, *, on_host: bool = False) -> Any:
        return [torch.zeros(num_pages, page_size, dtype=torch.bfloat16)]

    def allocate_states(self, num_slots: int, *, on_host: bool = False) -> Any:
        """States of each slot, each one more than the number of preceding tokens."""
        return [torch.zeros(num_slots, self.max_position)] if self.has_states else []

    def planner(self, cache_format: str, limits: Any) -> Any:
        return lambda batch, pad_to: Plan(batch)

    def __call__(self, tokens: torch.Tensor, caches: list[torch.Tensor], metadata: Any, rows: torch.Tensor) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("out of memory")
        cache, new = caches[0], iter(tokens.tolist())
        chosen = []
        if self.has_states:
            self.update_states(caches[1], tokens.tolist(), metadata)
        for count, length, table, slot in zip(
            metadata.counts, metadata.lengths, metadata.pages, metadata.state_slots, strict=True
        ):
            for place in range(length - count, length):
                cache[table[place // cache.shape[1]], place % cache.shape[1]] = next(new)
            context = cache[table].flatten().int().tolist()
            if self.has_states:
                assert (caches[1][slot, :length] - 1).int().tolist() == context[:length]
            chosen += [next_token(context[: place + 1]) for place in range(length - count, length)]
        return torch.nn.functional.one_hot(torch.tensor(chosen)[rows], VOCABULARY).float()

    def update_states(self, states: torch.Tensor, tokens: list[int], metadata: Any) -> None:
        """Check that a request's states follow as many tokens as it has computed, and add the new ones."""
        row = 0
        for count, length, slot, snapshots in zip(
            metadata.counts, metadata.lengths, metadata.state_slots, metadata.snapshots, strict=True
        ):
            state = states[slot].clone()
            assert int((state > 0).sum()) == length - count, "the states must follow the tokens before"
            for index in range(count):
                state[length - count + index] = 1 + tokens[row + index]
                for target in (where for taken, where in snapshots if taken == index + 1):
                    states[target] = state
            states[slot], row = state, row + count


class Plan:
    buffers = None

    def __init__(self, batch: StepBatch) -> None:
        self.counts, self.lengths, self.pages = batch.counts, batch.lengths, batch.pages
        self.num_tokens, self.state_slots, self.snapshots = len(batch.tokens), batch.state_slots, batch.snapshots


def expected(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def made(**options: Any) -> Engine:
    settings: dict[str, Any] = {"cache_format": "bf16", "page_size": 2, "max_num_batched_tokens": 8, "max_num_seqs": 3}
    return Engine(Hashes(options.pop("has_states", False)), **settings | options)


def serve(served: Engine) -> None:
    """Calls every method of an engine, some of them concurrently."""
    served.add(PROMPTS[2], greedy(NEW), request_id="stepped")
    served.add(PROMPTS[3], greedy(NEW), request_id="aborted", priority=1)
    served.step()
    stream = served.stream(PROMPTS[1], greedy(NEW, logprobs=0))
    dropped = served.stream(PROMPTS[0], greedy(NEW))
    got = [next(stream), next(dropped)]
    del dropped
    check_tokens(served.generate([PROMPTS[0], PROMPTS[1]], greedy(NEW)), 2)
    with contextlib.suppress(ValueError):  # it has ended already
        served.abort("aborted")
    assert [got[0], *stream] == expected(PROMPTS[1])
    while served.unfinished:
        check_tokens(served.step(), 0)


def check_tokens(given: list[Any], finished: int) -> None:
    for output in given:
        assert output.outputs[0].token_ids == expected(output.prompt_token_ids)[: len(output.outputs[0].token_ids)]
    assert sum(output.outputs[0].finish_reason == "length" for output in given) >= finished


def check_consistent(served: Engine) -> None:
    plans = served.scheduler
    requests = plans._unfinished.values()
    queued = sorted(one.id for one in (*plans._running, *plans._waiting))
    assert queued == sorted(plans._unfinished) == sorted(served._live)
    for pool, held in (
        (served.pool, [page for one in requests for page in one.pages]),
        (plans.host_pool, [page for one in requests for page in one.host_pages]),
    ):
        references = Counter(held)
        assert [pool.references(page) for page in range(pool.num_pages)] == [
            references[page] for page in range(pool.num_pages)
        ]
        assert pool.in_use == len(references)
        assert sorted([*pool._free, *pool._evictable]) == sorted(set(range(pool.num_pages)) - set(references))
        assert all(pool._pages[page].key == key for key, page in pool._registered.items())
    if isinstance(slots := plans.states, states.StateSlots):
        used = [one.states.slot for one in requests if one.states.slot]
        taken = [slot for one in requests for slot in one.states.taken.values()]
        assert sorted([*used, *slots._free]) == [*slots._of_requests]
        assert sorted([*taken, *slots._snapshots.values(), *slots._free_snapshots]) == [*slots._of_snapshots]
        hosted = [one.states.host_slot for one in requests if one.states.host_slot >= 0]
        assert sorted([*hosted, *slots._free_host]) == [*slots._of_host]


class Interrupts:
    """Raises KeyboardInterrupt at the n-th executed line of some modules within ``run``."""

    def __init__(self, modules: tuple[Any, ...], at: int | None = None) -> None:
        self.files, self.at = {inspect.getfile(module) for module in modules}, at
        self.reached: list[tuple[str, int]] = []
        self.raised: list[BaseException | None] = []

    def run(self, function: Callable[[], None]) -> None:
        """Exceptions in dropped streams, which Python only reports, are collected in ``raised`` as well."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda told: self.raised.append(told.exc_value)
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            function()
        except BaseException as error:
            self.raised.append(error.with_traceback(None))
        finally:
            sys.settrace(before)
            sys.unraisablehook = hook

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.reached.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.reached) - 1 == self.at:
                raise KeyboardInterrupt
        return self._trace


def check_interrupted(modules: tuple[Any, ...], options: dict[str, Any], at: int, use: Use = serve) -> None:
    served, interrupts = made(**options), Interrupts(modules, at)
    interrupts.run(lambda: use(served))
    assert [type(error) for error in interrupts.raised[:1]] == [KeyboardInterrupt], interrupts.raised
    assert isinstance(served.model, Hashes)
    served.model.fails_at = -1
    try:
        assert served.unfinished >= 0  # which completes an interrupted cleanup
        check_consistent(served)
        for _ in range(100):
            if not served.unfinished:
                break
            check_tokens(served.step(), 0)
        again = served.generate(PROMPTS, greedy(NEW))
        assert [output.outputs[0].token_ids for output in again] == [expected(prompt) for prompt in PROMPTS]
        assert served.unfinished == served.pool.in_use == served.scheduler.host_pool.in_use == 0
        check_consistent(served)
    except Exception as failure:
        raise AssertionError(f"interrupted at {interrupts.reached[-1]}, number {at} of its lines") from failure


def lines(modules: tuple[Any, ...], options: dict[str, Any], use: Use = serve) -> list[tuple[str, int]]:
    served, interrupts = made(**options), Interrupts(modules)
    interrupts.run(lambda: use(served))
    assert not interrupts.raised
    return interrupts.reached


def fail(served: Engine) -> None:
    """A step fails, so that cleanup code is interrupted too."""
    assert isinstance(served.model, Hashes)
    served.model.fails_at = 4
    with pytest.raises(RuntimeError, match="out of memory"):
        serve(served)
    check_tokens(served.generate(PROMPTS[:2], greedy(NEW)), 2)


def handles_signals(line: tuple[str, int]) -> bool:
    """Python handles signals at calls and backward jumps, but not between an exception and its first handler line."""
    return not linecache.getline(*line).lstrip().startswith(("except ", "self._interrupted = True"))


@pytest.mark.full
def test_an_interrupt_at_each_line_once():
    seen: set[tuple[str, int]] = set()
    for options, use in ((OPTIONS[0], serve), (OPTIONS[0], fail), (OPTIONS[1], serve), (OPTIONS[4], serve)):
        for number, line in enumerate(lines(PLANNING, options, use)):
            if line not in seen and handles_signals(line):
                check_interrupted(PLANNING, options, number, use)
            seen.add(line)
    assert len(seen) > 300


@pytest.mark.full
@pytest.mark.parametrize(
    ("modules", "options", "use"),
    [(ALL, OPTIONS[0], serve), (PLANNING, OPTIONS[0], fail), *((PLANNING, options, serve) for options in OPTIONS[1:])],
    ids=["all modules", "a step fails", *map(str, OPTIONS[1:])],
)
def test_an_interrupt_at_every_seventh_executed_line(modules, options, use):
    """Every executed line would take ten minutes."""
    for number, line in enumerate(lines(modules, options, use)):
        if number % 7 == 0 and handles_signals(line):
            check_interrupted(modules, options, number, use)


def test_a_step_without_a_schedulable_request_raises():
    served = made(num_pages=4)
    served.pool.allocate(4)
    with pytest.raises(RuntimeError, match=r"^none of 1 unfinished requests can be scheduled, with 0 of 4 pages free$"):
        served.generate([PROMPTS[3]], greedy(NEW))
    check_tokens(served.generate([PROMPTS[3]], greedy(NEW)), 1)
    assert served.unfinished == served.pool.in_use == 0
