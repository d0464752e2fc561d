"""Time dense decode on Hopper over pages of 64, 32 and 16 tokens and over e4m3 caches, in turns; also portable's e4m3.

PYTHONPATH=. python benchmarks/dense_decode_caches.py [--json benchmarks/results/dense_decode_caches.jsonl]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import checked
import torch

from flashlatte.bench.problems import DenseDecode

# Requests, query tokens, heads, keys.
SHAPES = ((128, 1, 16, 4096), (128, 1, 128, 4096), (128, 2, 128, 4096), (1, 1, 16, 131072), (16, 1, 128, 8192))
# Cache format, page size, backend.
CACHES = (
    (None, 64, "hopper"),
    (None, 32, "hopper"),
    (None, 16, "hopper"),
    ("fp8", 64, "hopper"),
    ("fp8", 16, "hopper"),
    ("fp8", 64, "portable"),
)


def decode(device: torch.device) -> Iterator[list[checked.Case]]:
    for batch, s_q, h_q, keys in SHAPES:
        group = []
        for cache_format, page_size, backend in CACHES if device.type == "cuda" else CACHES[2:5:2]:
            problem = DenseDecode(batch, s_q, h_q, keys, causal=s_q > 1, page_size=page_size, cache_format=cache_format)
            group.append(checked.of_problem(problem, device, backend=backend))
        yield group


SECTIONS: checked.Sections = {"decode": decode}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
