"""Problems of random sizes, small and large: few kernel variants, many lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from flashlatte.bench.problems import IndexLogits, IndexSelect, PagedIndexLogits, PagedIndexSelect, Problem, TopK

# Sixteen processes share 80 GB, and each holds the results of a few calls.
MOST_LOGITS = 2**24
MOST_CACHED = 2**20


def index_logits(rng: Random) -> IndexLogits:
    rows = log_uniform(rng, 1, 4096)
    keys = log_uniform(rng, 1, min(200_000, MOST_LOGITS // rows))
    head_dim = rng.choice((64, 128, 128))
    flags = {"ranges": rng.random() < 0.5, "clean": rng.random() < 0.5, "dtype": rng.choice(("fp32", "bf16"))}
    return IndexLogits(rows, keys, rng.choice((16, 32, 64, 64, 128)), head_dim, **flags)


def paged_index_logits(rng: Random) -> PagedIndexLogits:
    batch = log_uniform(rng, 1, 256)
    keys = log_uniform(rng, 2, min(400_000, MOST_CACHED // batch))
    sizes = (rng.choice((1, 2)), rng.choice((16, 32, 64, 64, 128)), rng.choice((32, 64, 128)), rng.choice((64, 128)))
    flags = {"varlen": rng.random() < 0.5, "clean": rng.random() < 0.5, "dtype": rng.choice(("fp32", "bf16"))}
    return PagedIndexLogits(batch, keys, *sizes, **flags)


def index_select(rng: Random) -> IndexSelect:
    return IndexSelect(index_logits(rng), rng.choice((512, 2048)), rng.choice((8, 512)))


def paged_index_select(rng: Random) -> PagedIndexSelect:
    return PagedIndexSelect(paged_index_logits(rng), rng.choice((512, 2048)))


def topk(rng: Random) -> TopK:
    rows = log_uniform(rng, 1, 4096)
    return TopK(rows, log_uniform(rng, 1, min(300_000, MOST_LOGITS // rows)), rng.choice((512, 2048)))


DRAWS: dict[str, Callable[[Random], Problem]] = {
    "index_logits": index_logits,
    "paged_index_logits": paged_index_logits,
    "index_select": index_select,
    "paged_index_select": paged_index_select,
    "topk": topk,
}


def log_uniform(rng: Random, low: int, high: int) -> int:
    """An int from ``low`` to ``high``, as often between 1 and 10 as between 10 and 100."""
    return min(max(round(math.exp(rng.uniform(math.log(low), math.log(max(high, low))))), low), high)
