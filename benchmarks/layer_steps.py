"""What the benchmarks of layers share: a step as a CUDA graph, its kernels by part, and the lines they report."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flashlatte.bench import environment, timing

DEVICE = torch.device("cuda")
REPLAYS = 20
# cuBLAS's names for matrix products, and for the sum of their parts.
MATMUL = r"gemm|gemv|nvjet|cutlass|splitk|cublas|dot_kernel|reduce_1Block"


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of one call, after one that compiles its kernels."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def kernel_microseconds(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Time of each kernel in one replay, by name."""
    from torch.profiler import ProfilerActivity, profile

    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, float] = collections.defaultdict(float)
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            times[event.name] += event.time_range.elapsed_us() / REPLAYS
    return dict(times)


def part_of(kernel: str, parts: dict[str, str]) -> str:
    """The first part whose pattern the kernel's name has; "rest" if none."""
    return next((part for part, names in parts.items() if re.search(names, kernel, re.IGNORECASE)), "rest")


def by_part(kernels: dict[str, float], parts: dict[str, str]) -> dict[str, float]:
    times: dict[str, float] = collections.defaultdict(float)
    for name, us in kernels.items():
        times[part_of(name, parts)] += us
    return times


def slowest_first(kernels: dict[str, float]) -> dict[str, float]:
    return {name[:70]: round(us, 2) for name, us in sorted(kernels.items(), key=lambda item: -item[1])}


def report(results: Iterable[dict[str, Any]], parts: dict[str, str], json_file: str | None) -> None:
    """Print each result as it comes, below its kernels, and append it to ``json_file`` with where it was measured."""
    facts = dataclasses.asdict(environment.describe(DEVICE)) | dataclasses.asdict(timing.measure_ceilings(DEVICE))
    for result in results:
        for name, us in result.get("kernels", {}).items():
            print(f"    {part_of(name, parts):28}{us:9.2f} us  {name}")
        print("  ".join(f"{key} {_shown(value)}" for key, value in result.items() if key != "kernels"), flush=True)
        if json_file:
            with open(json_file, "a") as file:
                file.write(json.dumps(result | facts) + "\n")
    print("  ".join(f"{key} {_shown(value)}" for key, value in facts.items()))


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 1 else f"{value:.1f}"
