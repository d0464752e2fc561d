"""Time top-k on Hopper beside the portable kernel, in turns, and the indexer's choice that it ends.

PYTHONPATH=. python benchmarks/topk.py [--section NAME] [--json benchmarks/results/topk.jsonl]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import checked
import torch
from checked import Case

from flashlatte.bench.problems import IndexLogits, IndexSelect, PagedIndexLogits, PagedIndexSelect, TopK
from flashlatte.bench.workloads import draw, prepare
from flashlatte.bench.workloads.indexer import TopKWorkload

SHAPES = (
    *((4096, width) for width in (8192, 32768, 131072)),
    (600, 32768),
    (128, 8192),
    (128, 131072),
    *((64, width) for width in (8192, 32768, 131072)),
    *((20, width) for width in (131072, 262144)),
    *((1, width) for width in (8192, 32768, 131072, 262144)),
)
KINDS = ("equal", "mostly zero", "concentrated", "sorted", "subnormal", "few ties")
WORKSPACES = (64, 600)  # MiB


def backends(device: torch.device) -> tuple[str, ...]:
    return ("portable", "hopper") if device.type == "cuda" else ("portable",)


def topk(device: torch.device) -> Iterator[list[Case]]:
    for problem in (*(TopK(*shape) for shape in SHAPES), TopK(4096, 32768, 512)):
        yield topk_group(problem, "normal", device)


def kinds(device: torch.device) -> Iterator[list[Case]]:
    for rows in (4096, 64):
        for kind in KINDS:
            yield topk_group(TopK(rows, 32768), kind, device)


def topk_group(problem: TopK, kind: str, device: torch.device) -> list[Case]:
    problem = problem if device.type == "cuda" else problem.scaled_down()
    workload = prepare(problem, device)
    assert isinstance(workload, TopKWorkload)
    workload.logits = of_kind(workload.logits, kind)
    more = {} if kind == "normal" else {"rows": kind}
    return [
        Case(
            problem.operation,
            problem.name,
            workload.run,
            workload.check,
            workload.bytes_moved,
            method="graph",
            backend=backend,
            more=more,
        )
        for backend in backends(device)
    ]


def of_kind(logits: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows that are hard to choose from, made of normal ones."""
    if kind == "equal":
        return torch.full_like(logits, 0.25)
    if kind == "mostly zero":
        return logits.masked_fill(logits < 1.3 * draw.STD, 0.0)
    if kind == "concentrated":
        return 7.0 * (1 + 1e-3 * logits.sigmoid())
    if kind == "sorted":
        return logits.sort(dim=1).values
    if kind == "subnormal":
        return (logits * 3000).int().view(torch.float32)
    return (logits * 3000).round() / 300 if kind == "few ties" else logits


def select(device: torch.device) -> Iterator[list[Case]]:
    """Prefill with the logits of 64 and of 600 MiB at once; a decode step to slots, in a CUDA graph."""
    of_problem = functools.partial(checked.of_problem, device=device, backend="hopper")
    logits = IndexLogits(4096, 32768, 64)
    yield [of_problem(IndexSelect(logits, workspace_mib=mib), more={"workspace_mib": mib}) for mib in WORKSPACES]
    yield [of_problem(PagedIndexSelect(PagedIndexLogits(64, 32768)), method="graph")]


SECTIONS: checked.Sections = {"topk": topk, "kinds": kinds, "select": select}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
