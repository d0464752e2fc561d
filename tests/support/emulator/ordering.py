"""The writes of other warps that are visible to a warp: vector clocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.emulator.elements import Array

# Warps of a cluster of eight CTAs.
MAX_WARPS = 256
_ALWAYS = 2**60


class Ordering:
    """The vector clocks of a warp, or of the arrivals at a barrier.

    Attributes:
        seen: for each warp, the time up to which its writes are visible.
        fenced: for each warp, the time up to which its writes are visible to asynchronous reads, which a proxy fence of
            some warp must precede.
    """

    def __init__(self, number: int | None = None) -> None:
        self.seen, self.fenced = np.zeros(MAX_WARPS, np.int64), np.zeros(MAX_WARPS, np.int64)
        self._number = number
        if number is not None:
            self.seen[number] = _ALWAYS

    def fence(self, clock: int) -> None:
        """``fence.proxy.async`` of this warp covers all writes that are visible to it."""
        covered = self.seen.copy()
        covered[self._number] = clock
        np.maximum(self.fenced, covered, out=self.fenced)

    def arrive(self, barrier: Ordering, clock: int) -> None:
        published = self.seen.copy()
        published[self._number] = clock
        np.maximum(barrier.seen, published, out=barrier.seen)
        np.maximum(barrier.fenced, self.fenced, out=barrier.fenced)

    def join(self, barrier: Ordering) -> None:
        np.maximum(self.seen, barrier.seen, out=self.seen)
        np.maximum(self.fenced, barrier.fenced, out=self.fenced)

    def unseen_writer(self, writes: Array) -> int | None:
        return _uncovered(writes, self.seen)

    def unfenced_writer(self, writes: Array) -> int | None:
        return _uncovered(writes, self.fenced)


def _uncovered(writes: Array, times: Array) -> Any:
    """The writer of a word that ``times`` does not cover.

    ``writes`` [2, words]: clock · MAX_WARPS + warp of the write that changed a word, and of a later one that wrote the
    same value, if any. One of the two suffices.
    """
    bad = writes[0] // MAX_WARPS > times[writes[0] % MAX_WARPS]
    if not bad.any():
        return None
    bad &= (writes[1] == 0) | (writes[1] // MAX_WARPS > times[writes[1] % MAX_WARPS])
    return int(writes[0][bad][0] % MAX_WARPS) if bad.any() else None
