"""Sizes, small as often as large. Sixteen processes share 80 GB, and each holds the results of a few calls."""

from __future__ import annotations

import math
from random import Random

HEADS = (16, 64, 128)
MOST_LATENTS, MOST_TOKENS = 2**17, 2**16


def log_uniform(rng: Random, low: int, high: int) -> int:
    """An int from ``low`` to ``high``, as often between 1 and 10 as between 10 and 100."""
    return min(max(round(math.exp(rng.uniform(math.log(low), math.log(max(high, low))))), low), high)
