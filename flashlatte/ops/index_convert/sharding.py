"""Which tokens of a request a rank of a context-parallel group holds."""

from __future__ import annotations

from typing import NamedTuple


class Sharding(NamedTuple):
    """Token t lies on rank (t // interleave) % size, there as token (t // (size · interleave)) · interleave +
    t % interleave.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1
