"""Shared by the benchmarks of layers: random weights, the kernels of a step by part, and the lines of a run."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flashlatte.bench import environment, timing
from flashlatte.bench.results import append_line

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
REPLAYS = 20
# cuBLAS's kernel names for matrix products, and for the sum of split products.
MATMUL = r"gemm|gemv|nvjet|cutlass|splitk|cublas|dot_kernel|reduce_1Block"


def randomize(layer: torch.nn.Module, generator: torch.Generator | None = None) -> None:
    """Normal weights that keep the scale of activations; 1 in vectors and 0 in biases."""
    for name, weight in layer.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)


def capture_step(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of one step."""
    return timing.capture(step, 1)[0]


def kernel_microseconds(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Time of each kernel in one replay, by name."""
    graph.replay()
    torch.cuda.synchronize()
    spent = timing.kernel_times(lambda: [graph.replay() for _ in range(REPLAYS)])
    return {name: us / REPLAYS for name, us in spent.items()}


def part_of(kernel: str, parts: dict[str, str]) -> str:
    """The first part whose pattern matches the kernel's name; "rest" if none."""
    return next((part for part, names in parts.items() if re.search(names, kernel, re.IGNORECASE)), "rest")


def by_part(kernels: dict[str, float], parts: dict[str, str]) -> dict[str, float]:
    times: dict[str, float] = collections.defaultdict(float)
    for name, us in kernels.items():
        times[part_of(name, parts)] += us
    return times


def slowest_first(kernels: dict[str, float]) -> dict[str, float]:
    return {name[:70]: round(us, 2) for name, us in sorted(kernels.items(), key=lambda item: -item[1])}


def parts_of_step(graph: torch.cuda.CUDAGraph, parts: dict[str, str], main_parts: Iterable[str]) -> dict[str, Any]:
    """Fields of a line: the time of each part, the share of all but ``main_parts``, and the kernels."""
    kernels = kernel_microseconds(graph)
    times = by_part(kernels, parts)
    return {
        "parts_us": {part: round(us, 2) for part, us in times.items()},
        "other_share": 1 - sum(times[part] for part in main_parts) / sum(times.values()),
        "kernels": slowest_first(kernels),
    }


def report(results: Iterable[dict[str, Any]], parts: dict[str, str], options: argparse.Namespace) -> int:
    """Print each result below its kernels as soon as it is measured, and append it to ``options.json``."""
    environment.check_gpu()
    torch.manual_seed(0)
    about = dataclasses.asdict(environment.describe(DEVICE)) | dataclasses.asdict(timing.measure_ceilings(DEVICE))
    for result in results:
        for name, us in result.get("kernels", {}).items():
            print(f"    {part_of(name, parts):28}{us:9.2f} us  {name}")
        print("  ".join(f"{key} {_shown(value)}" for key, value in result.items() if key != "kernels"), flush=True)
        append_line(options.json, result | about)
    print("  ".join(f"{key} {_shown(value)}" for key, value in about.items()))
    return 0


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 1 else f"{value:.1f}"
