"""Detects the death of ranks' processes by their closed connections."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# Global ranks that died. A rank of a job is not restarted.
_dead: set[int] = set()
# How long a leaving rank waits for the others' answers, and a failing rank for the detection of another rank's death.
_LEAVE_SECONDS, _DETECTION_SECONDS = 5.0, 0.25
_POLL_SECONDS = 0.01
# Messages of a leaving process: closed by ``leave``, or at exit.
_LEFT, _ENDED = 0.0, 1.0


class Watch:
    """Detects within milliseconds when another process of a gloo group exits without calling ``leave``.

    A thread for each other rank waits for a message, which is sent and answered only on leaving, so that all threads
    have ended when the process exits. The wait fails when the connection closes.

    Args:
        group: a gloo group that is used for nothing else; its timeout limits the duration of the watch.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._lock = group, threading.Lock()
        self._watched = {other for other in range(group.size()) if other != group.rank()}
        ranks = dist.get_process_group_ranks(group)
        self._threads = [
            threading.Thread(target=self._await, args=(other, ranks[other]), name=f"watch of rank {other}", daemon=True)
            for other in self._watched
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._exit)

    def leave(self) -> None:
        """End the watch on both sides; further calls do nothing. Takes up to 5 s if another process is stopped."""
        self._leave(_LEFT)

    def _exit(self) -> None:
        self._leave(_ENDED)

    def _leave(self, message: float) -> None:
        atexit.unregister(self._exit)
        for other in range(self._group.size()):
            self._send_farewell(other, message)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _await(self, other: int, global_rank: int) -> None:
        message = torch.full((1,), _ENDED, device="cpu")
        with contextlib.suppress(RuntimeError):
            self._group.recv([message], other, 0).wait()
        with self._lock:
            if other in self._watched and message.item() == _ENDED:
                _dead.add(global_rank)
        self._send_farewell(other, _LEFT)

    def _send_farewell(self, other: int, message: float) -> None:
        with self._lock:
            if other not in self._watched:
                return
            self._watched.remove(other)
        sent, timeout = torch.full((1,), message, device="cpu"), timedelta(seconds=_LEAVE_SECONDS)
        with contextlib.suppress(RuntimeError):
            self._group.send([sent], other, 0).wait(timeout)


def dead_rank(group: object, *, wait: bool = False) -> int | None:
    """The rank within a group of a dead process that a ``Watch`` of this process has detected, or None.

    Args:
        group: a process group; None is returned for other kinds of ``World``.
        wait: whether to wait up to 0.25 s for the detection, since the connections of a process close one by one.
    """
    if not isinstance(group, dist.ProcessGroup):
        return None
    deadline = time.monotonic() + (_DETECTION_SECONDS if wait else 0)
    while not _dead.intersection(ranks := dist.get_process_group_ranks(group)):
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)
    return next(number for number, rank in enumerate(ranks) if rank in _dead)
