"""Compares the ranks' arguments before a collective could hang on a mismatch, and reports failures of other ranks.

Both use the store of the process group's rendezvous instead of collectives, which would hang if a rank is missing or
runs another call.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from flashlatte.distributed.watch import dead_rank
from flashlatte.runtime import checks


class World(Protocol):
    """Processes with a common store: a process group, or processes that will form one."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def get_group_store(self) -> Any: ...


# All ranks create their objects of a kind in the same order, so that equal numbers identify the same object.
_counters: WeakKeyDictionary[World, defaultdict[str, itertools.count[int]]] = WeakKeyDictionary()
_FAILURE, _FAILED = "flashlatte/failure", "failed"
# Seconds between two polls of the store.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


def as_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the group of all ranks. Raise ValueError if there is none, TypeError if this rank is not in it."""
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("group must be a process group, and torch.distributed has none: call init_process_group()")
    # ``new_group`` returns another object to ranks outside of the group.
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group that this rank is in, got {group!r}")
    return group


class Agreement:
    """Compares facts over the ranks of a group. A set of facts is compared once; later checks are a lookup.

    A lookup asks no other rank. Therefore all ranks have agreed on every set of facts that one of them uses, but not on
    which of these sets a later call uses:

    * one rank passes a new set and another an old one: the first raises RuntimeError after ``timeout``.
    * two ranks pass different sets that both are old: no check finds it. Their collective hangs until the timeout of
      the process group, or combines tensors of different shapes into a wrong result.

    To find the second case, the host would have to read a value of the other ranks in each call. It would then wait for
    the GPU, or for the store, and could not launch ahead; no call of a CUDA graph could be checked.

    Args:
        group: ranks that create their objects of a kind, and check new facts, in the same order.
        timeout: how long a rank waits for the others.
        kind: namespace of the numbers of objects.
    """

    def __init__(self, group: World, timeout: timedelta, kind: str = "agreement") -> None:
        number = next(_counters.setdefault(group, defaultdict(itertools.count))[kind])
        self._prefix = f"flashlatte/{kind}/{number}"
        checks.instance("timeout", timeout, timedelta)
        self._group, self._timeout = group, timeout
        self._verified: set[tuple[object, ...]] = set()
        self._checks = itertools.count()

    def check(self, call: str, facts: Mapping[str, object]) -> None:
        """Raise ValueError on all ranks unless all make the same call with the same facts."""
        facts_key = (call, *facts.values())
        if facts_key in self._verified:
            return
        key, mine = self._publish(_as_strings(call, facts))
        if any(theirs != mine for theirs in self._gather(key, mine)):
            self._raise_mismatch(key, call)
        self._verified.add(facts_key)

    def check_present(self, call: str, facts: Mapping[str, object]) -> None:
        """``check`` against the facts that other ranks have published so far, without waiting."""
        key, mine = self._publish(_as_strings(call, facts))
        if any(theirs[name] != mine[name] for theirs in self._published(key).values() for name in mine.keys() & theirs):
            self._raise_mismatch(key, call)

    def withdraw(self, error: BaseException) -> None:
        """Make the next ``check`` of other ranks raise RuntimeError, since this rank has failed before it."""
        self._publish({_FAILED: _describe_error(error)})

    def same(self, call: str, value: object) -> bool:
        """Whether all ranks pass the same value."""
        key, mine = self._publish(_as_strings(call, {"value": value}))
        return all(theirs == mine for theirs in self._gather(key, mine))

    def all_reduce_min(self, call: str, number: int) -> int:
        """The minimum of the ranks' numbers. Raise ValueError if another rank makes another call."""
        key, mine = self._publish(_as_strings(call, {"value": number}))
        numbers = []
        for theirs in self._gather(key, mine):
            if theirs["call"] != call:
                self._raise_mismatch(key, call)
            numbers.append(int(theirs["value"]))
        return min(numbers)

    def _publish(self, facts: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Publish this rank's facts; returns the store key of the check, and the facts."""
        key = f"{self._prefix}/{next(self._checks)}"
        self._group.get_group_store().set(f"{key}/{self._group.rank()}", json.dumps(facts))
        return key, facts

    def _gather(self, key: str, mine: dict[str, str]) -> Iterator[dict[str, str]]:
        """Yield the facts of every rank as they arrive, so that a mismatch is found without waiting for all."""
        rank, store = self._group.rank(), self._group.get_group_store()
        deadline, pause = time.monotonic() + self._timeout.total_seconds(), _SHORTEST_PAUSE
        missing = list(range(self._group.size()))
        while True:
            here = [other for other in missing if store.check([f"{key}/{other}"])]
            for other in here:
                theirs = json.loads(store.get(f"{key}/{other}"))
                if _FAILED in theirs:
                    raise RuntimeError(f"rank {other} failed, therefore rank {rank} stops: {theirs[_FAILED]}")
                yield theirs
            missing = [other for other in missing if other not in here]
            if not missing:
                return
            check_others(self._group)
            if time.monotonic() > deadline:
                facts = _format_facts(mine, [name for name in mine if name != "call"])
                raise RuntimeError(
                    f"rank {missing[0]} did not reach {mine['call']} with {facts} within "
                    f"{self._timeout.total_seconds():g} s of rank {rank}: it runs another call, or has exited"
                )
            # store.wait() would log a warning at each timeout.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _published(self, key: str) -> dict[int, dict[str, str]]:
        """The published facts by rank, without failed ranks."""
        store = self._group.get_group_store()
        here = [rank for rank in range(self._group.size()) if store.check([f"{key}/{rank}"])]
        published = {rank: json.loads(store.get(f"{key}/{rank}")) for rank in here}
        return {rank: facts for rank, facts in published.items() if _FAILED not in facts}

    def _raise_mismatch(self, key: str, call: str) -> NoReturn:
        """Raise ValueError with the published facts that differ."""
        published = self._published(key)
        every = {
            name: [facts.get(name) for facts in published.values()] for facts in published.values() for name in facts
        }
        differ = [name for name, values in every.items() if len(set(values)) > 1]
        # Facts that only some ranks publish are reported only if all common ones agree.
        names = [name for name in differ if None not in every[name]] or differ
        if "call" in names:  # facts of different calls are not comparable
            names = ["call"]
        by_facts: dict[str, list[int]] = {}
        for rank, facts in published.items():
            by_facts.setdefault(_format_facts(facts, names), []).append(rank)
        each = "; ".join(f"{_format_ranks(ranks)} {facts}" for facts, ranks in by_facts.items())
        raise ValueError(f"{call} needs the same arguments on all ranks: {each}")


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context manager that reports an exception to the other ranks, or raises another rank's earlier failure instead.

    Interrupts (KeyboardInterrupt, SystemExit) are reported and re-raised. A rank inside a collective notices a failure
    when the collective fails: immediately if the other process exits, otherwise after the timeout of the group
    (``torch.distributed.init_process_group(timeout=…)``).

    Args:
        group: the ranks that run the same code; all ranks if None.

    Raises:
        RuntimeError: another rank failed first; with its rank and error. This rank's own error is the cause.
    """
    group = as_group(group)
    try:
        yield
    except GeneratorExit:
        raise  # closing the caller's generator is not a failure
    except BaseException as error:
        if isinstance(error, Exception):
            check_others(group, error)
        # The store is unavailable after the process that hosts it has exited.
        with contextlib.suppress(RuntimeError):
            group.get_group_store().set(f"{_FAILURE}/{group.rank()}", _describe_error(error))
        raise


def check_others(group: World, cause: Exception | None = None) -> None:
    """Raise RuntimeError if another rank has reported a failure (``failing_together``) or its process has died.

    Deaths are detected only for ranks with a ``Watch``, such as those of an engine.

    Args:
        cause: this rank's own error, if any. A failure of another rank with the same error does not raise.
    """
    rank, store = group.rank(), group.get_group_store()
    # The error of a collective (RuntimeError) may precede the detection of a death.
    dead = dead_rank(group, wait=isinstance(cause, RuntimeError))
    for other in range(group.size()):
        if other == rank:
            continue
        failure = "its process has ended" if other == dead else None
        try:
            if store.check([f"{_FAILURE}/{other}"]):
                failure = store.get(f"{_FAILURE}/{other}").decode()
        except RuntimeError:
            if dead is None:
                raise
        if failure is not None and failure != _describe_error(cause):
            raise RuntimeError(f"rank {other} failed, therefore rank {rank} stops: {failure}") from cause


def _describe_error(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _as_strings(call: str, facts: Mapping[str, object]) -> dict[str, str]:
    return {"call": call} | {name: str(value) for name, value in facts.items()}


def _format_facts(facts: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"{name} {facts.get(name)}" for name in names)


def _format_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} have"
