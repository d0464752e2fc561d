"""What ranks must have in common, compared before a collective would wait for ever; and who failed, and why.

Both go over the store by which the process group was set up, not over the group: a rank that is missing, or runs
something else, cannot be asked by a collective.
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
    """Processes that have a store in common: a process group, or those that are to be one."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def get_group_store(self) -> Any: ...


# All ranks make their objects of a kind in the same order, so that equal numbers are the same object.
_made: WeakKeyDictionary[World, defaultdict[str, itertools.count[int]]] = WeakKeyDictionary()
_FAILURE, _FAILED = "flashlatte/failure", "failed"
# Seconds between two looks at who has come, and whether somebody has failed.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


def as_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group of all ranks if None. Raises TypeError, ValueError: there is none yet; this rank is in another."""
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("group must be a process group, and torch.distributed has none yet: init_process_group()")
    # ``new_group`` gives a rank that is no member something else.
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group that this rank is in, got {group!r}")
    return group


class Agreement:
    """Compares facts over the ranks of a group, once for each new set of facts; afterwards it costs a look-up.

    Args:
        group: whose ranks all make their objects of a kind, and meet new facts, in the same order.
        timeout: how long a rank waits for the others.
        kind: of objects, which are counted apart from those of other kinds.
    """

    def __init__(self, group: World, timeout: timedelta, kind: str = "agreement") -> None:
        number = next(_made.setdefault(group, defaultdict(itertools.count))[kind])
        self._prefix = f"flashlatte/{kind}/{number}"
        checks.instance("timeout", timeout, timedelta)
        self._group, self._timeout = group, timeout
        self._known: set[tuple[object, ...]] = set()
        self._checks = itertools.count()

    def check(self, call: str, facts: Mapping[str, object]) -> None:
        """Raise ValueError, on all ranks, if the others do not make the same call with the same facts."""
        key = (call, *facts.values())
        if key in self._known:
            return
        place, mine = self._tell(_told(call, facts))
        if any(theirs != mine for theirs in self._of_every_rank(place, mine)):
            self._refuse(place, call)
        self._known.add(key)

    def check_those_here(self, call: str, facts: Mapping[str, object]) -> None:
        """``check`` with those that have come, which waits for nobody: those that come later find these facts."""
        place, mine = self._tell(_told(call, facts))
        if any(theirs[name] != mine[name] for theirs in self._said(place).values() for name in mine.keys() & theirs):
            self._refuse(place, call)

    def withdraw(self, error: BaseException) -> None:
        """Tell those that come, or wait, to the next ``check`` that this rank has failed before it: RuntimeError."""
        self._tell({_FAILED: _described(error)})

    def same(self, call: str, value: object) -> bool:
        """Whether all ranks come with the same value."""
        place, mine = self._tell(_told(call, {"value": value}))
        return all(theirs == mine for theirs in self._of_every_rank(place, mine))

    def least(self, call: str, number: int) -> int:
        """The smallest of the ranks' numbers. Raises ValueError where another rank makes another call."""
        place, mine = self._tell(_told(call, {"value": number}))
        numbers = []
        for theirs in self._of_every_rank(place, mine):
            if theirs["call"] != call:
                self._refuse(place, call)
            numbers.append(int(theirs["value"]))
        return min(numbers)

    def _tell(self, facts: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Where the ranks' facts of this check are, and this one's."""
        place = f"{self._prefix}/{next(self._checks)}"
        self._group.get_group_store().set(f"{place}/{self._group.rank()}", json.dumps(facts))
        return place, facts

    def _of_every_rank(self, place: str, mine: dict[str, str]) -> Iterator[dict[str, str]]:
        """The facts of every rank, as they come: those that disagree are not to wait for one that is late."""
        rank, store = self._group.rank(), self._group.get_group_store()
        until, pause = time.monotonic() + self._timeout.total_seconds(), _SHORTEST_PAUSE
        missing = list(range(self._group.size()))
        while True:
            here = [other for other in missing if store.check([f"{place}/{other}"])]
            for other in here:
                theirs = json.loads(store.get(f"{place}/{other}"))
                if _FAILED in theirs:
                    raise RuntimeError(f"rank {other} failed, and so rank {rank} ends: {theirs[_FAILED]}")
                yield theirs
            missing = [other for other in missing if other not in here]
            if not missing:
                return
            check_others(self._group)
            if time.monotonic() > until:
                facts = _listed(mine, [name for name in mine if name != "call"])
                raise RuntimeError(
                    f"rank {missing[0]} did not come to {mine['call']} with {facts} within "
                    f"{self._timeout.total_seconds():g} s, as rank {rank} did: it runs something else, or has ended"
                )
            # A store's own wait would write a warning each time that nobody comes.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _said(self, place: str) -> dict[int, dict[str, str]]:
        """The facts of every rank that has come and has not failed."""
        store = self._group.get_group_store()
        here = [rank for rank in range(self._group.size()) if store.check([f"{place}/{rank}"])]
        said = {rank: json.loads(store.get(f"{place}/{rank}")) for rank in here}
        return {rank: facts for rank, facts in said.items() if _FAILED not in facts}

    def _refuse(self, place: str, call: str) -> NoReturn:
        """Raise ValueError with what each rank said, of those that have come."""
        said = self._said(place)
        every = {name: [facts.get(name) for facts in said.values()] for facts in said.values() for name in facts}
        differ = [name for name, values in every.items() if len(set(values)) > 1]
        # A fact that only some ranks state counts where all others agree.
        names = [name for name in differ if None not in every[name]] or differ
        if "call" in names:  # Of different calls nothing else can be compared.
            names = ["call"]
        by_facts: dict[str, list[int]] = {}
        for rank, facts in said.items():
            by_facts.setdefault(_listed(facts, names), []).append(rank)
        each = "; ".join(f"{_named(ranks)} {facts}" for facts, ranks in by_facts.items())
        raise ValueError(f"{call} needs the same on all ranks: {each}")


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Tell the other ranks of an error raised within; raise another rank's error instead if that came first.

    An interrupt (KeyboardInterrupt, SystemExit) is told as well, and is always raised itself. A rank that waits in a
    collective learns of an error when the collective fails: at once when the other process ends, otherwise after the
    timeout of the group (``torch.distributed.init_process_group(timeout=…)``).

    Args:
        group: of the ranks that run the same; all if None.

    Raises:
        RuntimeError: another rank failed first, with its number and its error; this rank's own is the cause.
    """
    group = as_group(group)
    try:
        yield
    except GeneratorExit:
        raise  # the caller is a generator that was closed, which is no failure
    except BaseException as error:
        if isinstance(error, Exception):
            check_others(group, error)
        # The store ends with the process that serves it.
        with contextlib.suppress(RuntimeError):
            group.get_group_store().set(f"{_FAILURE}/{group.rank()}", _described(error))
        raise


def check_others(group: World, cause: Exception | None = None) -> None:
    """Raise RuntimeError where another rank has told of a failure, by ``failing_together``, or has died.

    Deaths are known of ranks that a ``Watch`` watches, as those of an engine.

    Args:
        cause: this rank's own error, if that is why it asks. One that the other rank has too is no reason to raise.
    """
    rank, store = group.rank(), group.get_group_store()
    # A collective's error (RuntimeError) may be the first sign of a death.
    dead = dead_rank(group, may_be_news=isinstance(cause, RuntimeError))
    for other in range(group.size()):
        if other == rank:
            continue
        told = "its process has ended" if other == dead else None
        try:
            if store.check([f"{_FAILURE}/{other}"]):
                told = store.get(f"{_FAILURE}/{other}").decode()
        except RuntimeError:
            if dead is None:
                raise
        if told is not None and told != _described(cause):
            raise RuntimeError(f"rank {other} failed, and so rank {rank} ends: {told}") from cause


def _described(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _told(call: str, facts: Mapping[str, object]) -> dict[str, str]:
    return {"call": call} | {name: str(value) for name, value in facts.items()}


def _listed(facts: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"{name} {facts.get(name)}" for name in names)


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} have"
