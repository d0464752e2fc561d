"""Time paged attention of grouped queries: decode beside its one-byte caches, prefill, and batches of both, in turns.

PYTHONPATH=. python benchmarks/paged_attention.py [--section NAME] [--json benchmarks/results/paged_attention.jsonl]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import checked
import torch

from flashlatte.bench.problems import PagedAttention


def decode(device: torch.device) -> Iterator[list[checked.Case]]:
    for page_size in (64, 16):
        problems = [PagedAttention(128, 0, 4096, dtype, page_size) for dtype in ("bf16", "e4m3", "e5m2", "int8")]
        yield [checked.of_problem(problem, device) for problem in problems]
    yield [checked.of_problem(PagedAttention(1, 0, 131_072), device)]


def prefill(device: torch.device) -> Iterator[list[checked.Case]]:
    for page_size in (64, 16, 128):
        problem = PagedAttention(0, 8192, 8192, page_size=page_size)
        yield [checked.of_problem(problem, device, backend=backend) for backend in ("hopper", "portable")]


def mixed(device: torch.device) -> Iterator[list[checked.Case]]:
    """64 decodes and a chunk of 2,048 queries, of 8,192 keys each: together, and each alone."""
    for page_size in (64, 16):
        both, decodes, chunk = (
            PagedAttention(batch, queries, 8192, page_size=page_size)
            for batch, queries in ((64, 2048), (64, 0), (0, 2048))
        )
        yield [
            checked.of_problem(both, device, backend="hopper"),
            checked.of_problem(decodes, device),
            checked.of_problem(chunk, device, backend="hopper"),
        ]


SECTIONS: checked.Sections = {"decode": decode, "prefill": prefill, "mixed": mixed}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
