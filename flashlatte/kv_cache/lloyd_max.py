"""Codebooks of minimal mean square error for normally distributed values (Max, 1960; Lloyd, 1982)."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

_SMALLEST_STEP = 1e-13


@functools.cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits centroids for N(0, 1) in ascending order, symmetric about 0.

    Lloyd's iteration: the boundaries of a cell are the midpoints to the adjacent centroids, and its centroid is the
    mean of N(0, 1) in the cell, (φ(a) - φ(b)) / (Φ(b) - Φ(a)) between a and b.
    """
    count = 2**bits
    positive = [3.5 * (2 * index + 1) / count for index in range(count // 2)]
    while True:
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(positive)), math.inf]
        moved = [_mean_between(a, b) for a, b in pairwise(edges)]
        step = max(abs(new - old) for new, old in zip(moved, positive, strict=True))
        positive = moved
        if step < _SMALLEST_STEP:
            return (*(-x for x in reversed(positive)), *positive)


@functools.cache
def midpoints(bits: int) -> tuple[float, ...]:
    """The boundaries between the cells of ``lloyd_max``; a value at a boundary belongs to the upper cell."""
    centroids = lloyd_max(bits)
    return tuple((a + b) / 2 for a, b in pairwise(centroids))


def _mean_between(a: float, b: float) -> float:
    """The mean of N(0, 1) between 0 ≤ a < b."""
    density = (math.exp(-a * a / 2) - math.exp(-b * b / 2)) / math.sqrt(2 * math.pi)
    return density / ((math.erfc(a / math.sqrt(2)) - math.erfc(b / math.sqrt(2))) / 2)
