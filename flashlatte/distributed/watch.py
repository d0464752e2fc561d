"""Which ranks have died: a process that is killed tells nobody, but its connections close."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# Global ranks that died. A rank of a job does not come back.
_dead: set[int] = set()
# How long a leaving rank waits for the answers of the others, and a failing one for news of a death behind its error.
_LEAVE_SECONDS, _NEWS_SECONDS = 5.0, 0.25
_POLL_SECONDS = 0.01
# What a process says of itself when it leaves.
_LEFT, _ENDED = 0.0, 1.0


class Watch:
    """Notices within milliseconds when another process of a gloo group ends before it calls ``leave``.

    For each of the others a thread waits for a message that is sent on leaving only, and is answered, so that no
    thread waits any longer when the process exits. The wait fails when the connection closes.

    Args:
        group: of gloo, used for nothing else; its timeout bounds the watch.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._lock = group, threading.Lock()
        self._present = {other for other in range(group.size()) if other != group.rank()}
        ranks = dist.get_process_group_ranks(group)
        self._threads = [
            threading.Thread(target=self._await, args=(other, ranks[other]), name=f"watch of rank {other}", daemon=True)
            for other in self._present
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._exit)

    def leave(self) -> None:
        """End the watch on both sides; again, nothing. Takes up to 5 s where another process is stopped."""
        self._leave(_LEFT)

    def _exit(self) -> None:
        self._leave(_ENDED)

    def _leave(self, message: float) -> None:
        atexit.unregister(self._exit)
        for other in range(self._group.size()):
            self._say_goodbye(other, message)
        until = time.monotonic() + _LEAVE_SECONDS
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def _await(self, other: int, global_rank: int) -> None:
        message = torch.full((1,), _ENDED, device="cpu")
        with contextlib.suppress(RuntimeError):
            self._group.recv([message], other, 0).wait()
        with self._lock:
            if other in self._present and message.item() == _ENDED:
                _dead.add(global_rank)
        self._say_goodbye(other, _LEFT)

    def _say_goodbye(self, other: int, message: float) -> None:
        with self._lock:
            if other not in self._present:
                return
            self._present.remove(other)
        sent, patience = torch.full((1,), message, device="cpu"), timedelta(seconds=_LEAVE_SECONDS)
        with contextlib.suppress(RuntimeError):
            self._group.send([sent], other, 0).wait(patience)


def dead_rank(group: object, *, may_be_news: bool = False) -> int | None:
    """A rank of a group, by its number there, whose death a ``Watch`` of this process has noticed.

    Args:
        group: a process group, or another kind of world, whose ranks nobody watches.
        may_be_news: whether to wait a quarter of a second for it, as the connections of a process close one by one.
    """
    if not isinstance(group, dist.ProcessGroup):
        return None
    until = time.monotonic() + (_NEWS_SECONDS if may_be_news else 0)
    while not _dead.intersection(ranks := dist.get_process_group_ranks(group)):
        if time.monotonic() >= until:
            return None
        time.sleep(_POLL_SECONDS)
    return next(number for number, rank in enumerate(ranks) if rank in _dead)
