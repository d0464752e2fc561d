"""Time DeepSeek-V4's operations: the compressor, what a layer does between its products, and between layers.

    PYTHONPATH=. python benchmarks/deepseek_v4.py [--section NAME] [--json benchmarks/results/deepseek_v4.jsonl]

8,192 tokens of prefill and decode steps of 128 requests, in CUDA graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import checked
import torch
from checked import Case

from flashlatte.bench.problems import (
    Compress,
    IndexQuery,
    InverseRopeQuantize,
    MhcPost,
    MhcPre,
    Problem,
    QKVNorm,
    RotateAndCache,
)

TOKENS, REQUESTS = 8192, 128


def compressor(device: torch.device) -> Iterator[list[Case]]:
    for cache_format, ratio in (("model1", 4), ("model1", 128), ("index_fp8", 4), ("index_mxfp4", 4)):
        for dtype in ("float32", "bfloat16"):
            yield in_graph(Compress(cache_format, ratio, tokens=TOKENS, dtype=dtype), device)
        yield in_graph(Compress(cache_format, ratio, requests=REQUESTS), device)


def elementwise(device: torch.device) -> Iterator[list[Case]]:
    for problem in (QKVNorm(TOKENS), RotateAndCache(TOKENS), InverseRopeQuantize(TOKENS)):
        yield in_graph(problem, device)
    for four_bits in (False, True):
        yield in_graph(IndexQuery(TOKENS, four_bits=four_bits), device)


def streams(device: torch.device) -> Iterator[list[Case]]:
    """Hyper-connections of a decode step and of a prefill."""
    for tokens in (64, TOKENS):
        yield in_graph(MhcPre(tokens), device)
        yield in_graph(MhcPost(tokens), device)


def in_graph(problem: Problem, device: torch.device) -> list[Case]:
    return [checked.of_problem(problem, device, method="graph")]


SECTIONS: checked.Sections = {"compressor": compressor, "elementwise": elementwise, "streams": streams}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
