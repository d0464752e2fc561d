"""Time TurboQuant's decode beside bf16 paged attention, in turns, and its store and gather.

PYTHONPATH=. python benchmarks/turboquant.py [--section NAME] [--json benchmarks/results/turboquant.jsonl]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import checked
import torch

from flashlatte.bench.problems import PagedAttention, TurboQuantDecode, TurboQuantGather, TurboQuantStore
from flashlatte.bench.workloads import prepare
from flashlatte.bench.workloads.turboquant import TurboQuantDecodeWorkload
from flashlatte.kv_cache import turboquant


def decode(device: torch.device) -> Iterator[list[checked.Case]]:
    """64 requests of 8,192 keys in CUDA graphs; then the same in vLLM's strides, and a single request."""
    problems = [TurboQuantDecode(name, 64, 8192) for name in turboquant.TURBOQUANT_NAMES]
    bf16 = PagedAttention(64, 0, 8192)
    yield [checked.of_problem(problem, device, method="graph") for problem in (bf16, *problems)]
    four_bits = problems[1] if device.type == "cuda" else problems[1].scaled_down()
    workload = prepare(four_bits, device)
    assert isinstance(workload, TurboQuantDecodeWorkload)
    workload.cache = workload.cache.contiguous()  # records side by side, without the gap that aligns heads
    moved, more = workload.bytes_moved, {"variant": "vLLM's strides"}
    yield [
        checked.Case(
            four_bits.operation, four_bits.name, workload.run, workload.check, moved, method="graph", more=more
        )
    ]
    del workload
    yield [checked.of_problem(TurboQuantDecode("turboquant_4bit_nc", 1, 8192), device, method="graph")]


def store(device: torch.device) -> Iterator[list[checked.Case]]:
    for name in turboquant.TURBOQUANT_NAMES:
        yield [checked.of_problem(TurboQuantStore(name, 65536), device)]


def gather(device: torch.device) -> Iterator[list[checked.Case]]:
    """One request's tokens, from pages in random order to contiguous keys and values in bf16."""
    for name in turboquant.TURBOQUANT_NAMES:
        yield [checked.of_problem(TurboQuantGather(name, 65536), device)]


SECTIONS: checked.Sections = {"decode": decode, "store": store, "gather": gather}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
