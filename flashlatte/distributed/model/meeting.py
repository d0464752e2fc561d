"""Where processes compare what they are about to make together, before any of them loads or waits in a collective."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashlatte.distributed.agreement import Agreement, World

# Ranks load a checkpoint, and compile kernels, at their own pace.
PATIENCE = timedelta(minutes=10)
# To reach a store that was there before the process.
_GLANCE = timedelta(seconds=10)


class Meeting(contextlib.AbstractContextManager["Meeting"]):
    """The making of an engine by the processes of a job. An error within is told to those that wait for this one.

    All processes make their engines in the same order. It goes over the store of the process group, or where there is
    none yet that of ``torchrun``.

    Args:
        joins: whether this process is to be one of several ranks. If not, it tells, and waits for nobody.
    """

    def __init__(self, joins: bool) -> None:
        self.world = _world(joins)
        self._joins, self._told = joins, False
        self._agreement = None if self.world is None else Agreement(self.world, PATIENCE, kind="engine")

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise ValueError, on all ranks, where the others come with other facts.

        Raises:
            RuntimeError: another rank failed, or does not come.
        """
        self._told = True
        if self._agreement is not None:
            compare = self._agreement.check if self._joins else self._agreement.check_those_here
            compare("Engine", facts)

    def join(self) -> dist.ProcessGroup:
        """The group of all processes, made if they do not know each other yet."""
        if not dist.is_initialized():
            assert self.world is not None
            dist.init_process_group(
                "nccl" if torch.cuda.is_available() else "gloo",
                store=self.world.get_group_store(),
                rank=self.world.rank(),
                world_size=self.world.size(),
            )
        group = dist.group.WORLD
        assert group is not None
        return group

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._agreement is not None and isinstance(error, BaseException) and not self._told:
            self._told = True
            self._agreement.withdraw(error)


@dataclass(frozen=True, eq=False)
class _Started:
    """Processes that a launcher started, and that are no process group yet."""

    store: Any
    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count

    def get_group_store(self) -> Any:
        return self.store


def _world(joins: bool) -> World | None:
    """The processes that there are; None if this is the only one, or would have to wait to know the others."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if "RANK" not in os.environ:
        return None
    if joins:
        return _started()
    # Another launcher's processes have a store once rank 0 makes it.
    if _launcher_has_store():
        with contextlib.suppress(RuntimeError, ValueError):
            return _started()
    return None


@functools.lru_cache(1)
def _started() -> _Started:
    from torch.distributed.rendezvous import rendezvous

    timeout = _GLANCE if _launcher_has_store() else PATIENCE
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(PATIENCE)
    return _Started(store, rank, size)


def _launcher_has_store() -> bool:
    """Whether it is torchrun's, which it made before the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
