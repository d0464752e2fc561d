"""What ranks must have in common, compared before a collective would wait for ever; and who failed, and why.

Both go over the store by which the process group was set up, not over the group: a rank that is missing, or runs
something else, cannot be asked by a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

# All ranks make their objects in the same order, so that equal numbers are the same object.
_made: WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = WeakKeyDictionary()
_FAILURE = "flashlatte/failure"
# Of a wait, until it is asked whether whom it is for has failed.
_GLANCE = timedelta(seconds=1)


class Agreement:
    """Compares facts over the ranks of a group, once for each new set of facts; afterwards it costs a look-up.

    Args:
        group: whose ranks all make their objects, and meet new facts, in the same order.
        timeout: how long a rank waits for the others.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        number = next(_made.setdefault(group, itertools.count()))
        self._prefix = f"flashlatte/agreement/{number}"
        self._group, self._timeout = group, timeout
        self._known: set[tuple[object, ...]] = set()
        self._checks = itertools.count()

    def check(self, call: str, facts: Mapping[str, object]) -> None:
        """Raise ValueError, on all ranks, if the others do not make the same call with the same facts."""
        key = (call, *facts.values())
        if key in self._known:
            return
        rank = self._group.rank()
        mine = {"call": call} | {name: str(value) for name, value in facts.items()}
        for other, theirs in enumerate(self._of_every_rank(call, mine)):
            if theirs != mine:
                names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
                raise ValueError(
                    f"{call} needs the same on all ranks: rank {rank} has {_listed(mine, names)}, and rank {other} "
                    f"{_listed(theirs, names)}"
                )
        self._known.add(key)

    def same(self, call: str, value: object) -> bool:
        """Whether all ranks come with the same value."""
        mine = {"call": call, "value": str(value)}
        return all(theirs == mine for theirs in self._of_every_rank(call, mine))

    def least(self, call: str, number: int) -> int:
        """The smallest of the ranks' numbers. Raises ValueError where another rank makes another call."""
        numbers = []
        for other, theirs in enumerate(self._of_every_rank(call, {"call": call, "value": str(number)})):
            if theirs["call"] != call:
                raise ValueError(f"all ranks must ask for {call}, and rank {other} makes {theirs['call']} instead")
            numbers.append(int(theirs["value"]))
        return min(numbers)

    def _of_every_rank(self, call: str, mine: dict[str, str]) -> Iterator[dict[str, str]]:
        rank, store = self._group.rank(), self._group.get_group_store()
        place = f"{self._prefix}/{next(self._checks)}"
        store.set(f"{place}/{rank}", json.dumps(mine))
        until = time.monotonic() + self._timeout.total_seconds()
        for other in range(self._group.size()):
            while not _comes(store, f"{place}/{other}", until - time.monotonic()):
                check_others(self._group)
                if time.monotonic() > until:
                    seconds = f"{self._timeout.total_seconds():g} s"
                    raise RuntimeError(
                        f"rank {other} did not come to {call} with {_listed(mine)} within {seconds}, as rank {rank} "
                        "did: it runs something else, or has ended"
                    )
            yield json.loads(store.get(f"{place}/{other}"))


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Tell the other ranks of an error raised within; raise, where another one of another rank came first, that.

    A rank that waits in a collective learns of it when that fails: at once when the other process ends, and else after
    the time-out that the group was made with (``torch.distributed.init_process_group(timeout=…)``).

    Args:
        group: of the ranks that run the same; all if None.

    Raises:
        RuntimeError: another rank failed first, with its number and its error; this rank's own is the cause.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("group must be a process group, and torch.distributed has none yet: init_process_group()")
    try:
        yield
    except Exception as error:
        check_others(group, error)
        group.get_group_store().set(f"{_FAILURE}/{group.rank()}", _described(error))
        raise


def check_others(group: dist.ProcessGroup, cause: Exception | None = None) -> None:
    """Raise RuntimeError where another rank has told of a failure, by ``failing_together``.

    Args:
        cause: this rank's own error, if that is why it asks. One that the other rank has too is no reason to raise.
    """
    rank, store = group.rank(), group.get_group_store()
    for other in range(group.size()):
        if other != rank and store.check([f"{_FAILURE}/{other}"]):
            told = store.get(f"{_FAILURE}/{other}").decode()
            if told != _described(cause):
                raise RuntimeError(f"rank {other} failed, and so rank {rank} ends: {told}") from cause


def _described(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"


def _comes(store: Any, key: str, seconds: float) -> bool:
    """Whether a key comes within so many seconds, and within a short time."""
    try:
        store.wait([key], min(timedelta(seconds=max(seconds, 0)), _GLANCE))
    except RuntimeError:
        return False
    return True


def _listed(facts: Mapping[str, object], names: list[str] | None = None) -> str:
    return ", ".join(f"{name} {facts.get(name)}" for name in (names or facts) if names or name != "call")
