"""Compares the engines that processes are about to create, before any of them loads weights or uses a collective."""

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

# Ranks load checkpoints and compile kernels at different speeds.
TIMEOUT = timedelta(minutes=10)
# For a store that exists before the process.
_CONNECT_TIMEOUT = timedelta(seconds=10)


class Rendezvous(contextlib.AbstractContextManager["Rendezvous"]):
    """Context manager around the creation of an engine by the processes of a job; it reports errors to waiting ranks.

    All processes must create their engines in the same order. It uses the store of the process group, or that of
    ``torchrun`` if there is no group yet.

    Args:
        joins: whether this process will be one of several ranks. If False, it publishes its facts without waiting.
    """

    def __init__(self, joins: bool) -> None:
        self.world = _world(joins)
        self._joins, self._published = joins, False
        self._agreement = None if self.world is None else Agreement(self.world, TIMEOUT, kind="engine")

    def agree(self, facts: Mapping[str, object]) -> None:
        """Compare facts with the other ranks.

        Raises:
            ValueError: another rank has other facts; raised on all ranks.
            RuntimeError: another rank failed, or does not publish its facts within the timeout.
        """
        self._published = True
        if self._agreement is not None:
            compare = self._agreement.check if self._joins else self._agreement.check_present
            compare("Engine", facts)

    def join(self) -> dist.ProcessGroup:
        """The group of all processes, initialized if there is none."""
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
        if self._agreement is not None and isinstance(error, BaseException) and not self._published:
            self._published = True
            self._agreement.withdraw(error)


@dataclass(frozen=True, eq=False)
class _LaunchedWorld:
    """The processes of a launcher before a process group exists."""

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
    """The processes of the job; None for a single process, or if finding the others would block."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if "RANK" not in os.environ:
        return None
    if joins:
        return _launched_world()
    # With other launchers, the store exists only after rank 0 creates it.
    if _launcher_has_store():
        with contextlib.suppress(RuntimeError, ValueError):
            return _launched_world()
    return None


@functools.lru_cache(1)
def _launched_world() -> _LaunchedWorld:
    from torch.distributed.rendezvous import rendezvous

    timeout = _CONNECT_TIMEOUT if _launcher_has_store() else TIMEOUT
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(TIMEOUT)
    return _LaunchedWorld(store, rank, size)


def _launcher_has_store() -> bool:
    """Whether torchrun created the store before the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
