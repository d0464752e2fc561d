"""How the cost of dense decode grows with requests, keys and heads: µs a call, to be divided by the keys.

PYTHONPATH=. python benchmarks/cost_growth.py [--json FILE]; with VLLM_KERNELS as in peers.py FlashMLA takes turns.
Graphs of ten calls; lengths are equal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import checked
import peers
import torch

from flashlatte.bench.problems import DenseDecode
from flashlatte.bench.workloads import prepare

HEADS = (8, 16, 64, 128)
BATCHES = (1, 4, 16, 64, 128, 512)
KEYS = tuple(2**power for power in range(10, 21))
# Keys of all requests: 19 GB of cache.
MOST_KEYS = 2**24


def decode(device: torch.device) -> Iterator[list[checked.Case]]:
    there = peers.load(device) if os.environ.get("VLLM_KERNELS") else False
    sizes = ((batch, h_q, keys) for h_q in HEADS for batch in BATCHES for keys in KEYS if batch * keys <= MOST_KEYS)
    for batch, h_q, keys in sizes:
        problem = peers.sized(DenseDecode(batch, 1, h_q, keys), device)
        work = prepare(problem, device)
        yield peers.beside(work, problem.name, {"flashmla": peers.flashmla_decode(work)} if there else {}, "graph")


SECTIONS: checked.Sections = {"decode": decode}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS, rounds=2))
