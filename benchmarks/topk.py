"""Time top-k on Hopper beside the portable kernel, in turns, and the indexer's choice that it ends.

PYTHONPATH=. python benchmarks/topk.py [--section NAME] [--json benchmarks/results/topk.jsonl]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

import checked
import torch
from checked import Case

from flashlatte.bench.problems import IndexLogits, PagedIndexLogits, TopK
from flashlatte.bench.workloads import draw, prepare
from flashlatte.bench.workloads.base import Results, spread
from flashlatte.bench.workloads.indexer import LOGITS, IndexLogitsWorkload, PagedIndexLogitsWorkload, TopKWorkload
from flashlatte.ops.index_logits import index_logits, paged_index_logits
from flashlatte.ops.index_select import index_select, paged_index_select

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
COMPARED_ROWS = 16


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
    yield [prefill_case(IndexLogits(4096, 32768, 64), mebibytes, device) for mebibytes in WORKSPACES]
    yield [decode_case(PagedIndexLogits(64, 32768), device)]


def prefill_case(problem: IndexLogits, mebibytes: int, device: torch.device) -> Case:
    problem = problem if device.type == "cuda" else problem.scaled_down()
    data, k = IndexLogitsWorkload(problem, device), topk_on(device)
    chosen = spread(problem.rows, COMPARED_ROWS, device)

    def call(backend: str) -> Results:
        ranges = data.key_start, data.key_end
        options = {"k_scale": data.k_scale, "backend": backend}
        indices = index_select(data.q, data.k, data.weights, *ranges, k, workspace_bytes=mebibytes << 20, **options)
        return {"indices": indices}

    def logits() -> torch.Tensor:
        rows = (x[chosen] for x in (data.weights, data.key_start, data.key_end))
        return index_logits(data.q[chosen], data.k, *rows, k_scale=data.k_scale, backend="reference")

    return Case(
        "index_select",
        f"{problem.name}-top{k}",
        call,
        of_largest(logits, k, lambda results: results["indices"][chosen].long()),
        data.bytes_moved,
        data.flops,
        backend="hopper",
        more={"workspace_mib": mebibytes},
    )


def decode_case(problem: PagedIndexLogits, device: torch.device) -> Case:
    problem = problem if device.type == "cuda" else problem.scaled_down()
    data, k = PagedIndexLogitsWorkload(problem, device), topk_on(device)
    chosen, page_size = spread(problem.batch, COMPARED_ROWS, device), problem.page_size
    arguments = (data.q, data.cache, data.weights, data.lengths, data.table)
    # Each page is one request's, and at one place of it.
    place = torch.empty(data.table.numel(), dtype=torch.int64, device=device)
    place[data.table.flatten().long()] = torch.arange(data.table.shape[1], device=device).repeat(problem.batch)

    def call(backend: str) -> Results:
        return {"slots": paged_index_select(*arguments, k, slots=True, backend=backend)}

    def logits() -> torch.Tensor:
        rows = (data.q[chosen], data.cache, *(x[chosen] for x in arguments[2:]))
        return paged_index_logits(*rows, max_keys=problem.keys, backend="reference")

    def positions(results: Results) -> torch.Tensor:
        slots = results["slots"][chosen].long()
        exists = (slots >= 0) & (slots < len(place) * page_size)
        page = torch.where(exists, slots, 0) // page_size
        return torch.where(exists, place[page] * page_size + slots % page_size, -1)

    return Case(
        "paged_index_select",
        f"{problem.name}-top{k}-slots",
        call,
        of_largest(logits, k, positions),
        data.bytes_moved,
        data.flops,
        method="graph",
        backend="hopper",
    )


def topk_on(device: torch.device) -> int:
    return 2048 if device.type == "cuda" else 64


def of_largest(
    logits: Callable[[], torch.Tensor], k: int, positions: Callable[[Results], torch.Tensor]
) -> Callable[[Results], None]:
    """A check: the logits at the chosen positions, each once, are the k largest of the reference's."""
    everything = functools.cache(logits)

    def chosen(results: Results) -> Results:
        at, width = positions(results).sort(dim=1).values, everything().shape[1]
        right = (at >= 0) & (at < width) & (at != at.roll(1, dims=1))
        found = everything().gather(1, at.clamp(0, width - 1)).masked_fill(~right, torch.nan)
        return {"logits": found.sort(dim=1, descending=True).values}

    return checked.against(lambda: {"logits": everything().topk(k, dim=1).values}, {"logits": LOGITS}, chosen)


SECTIONS: checked.Sections = {"topk": topk, "kinds": kinds, "select": select}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
