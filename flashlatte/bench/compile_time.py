"""Compile time of each kernel of the bench cases, by stage of Triton, for a GPU that need not be present.

    flashlatte bench compile-time [--op dense_decode] [--backend hopper] [--json FILE]

Cases run with their number of heads and few keys, since lengths do not change the variant. A kernel's seconds are
processor time, including ptxas; those of its stages are wall-clock time, which is longer on a busy machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton

from flashlatte.bench import environment, workloads
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.cases import CASES
from flashlatte.bench.results import append_line
from flashlatte.runtime import machine, precompile

H100 = machine.GPU((9, 0), 132)
BACKENDS = ("hopper", "portable")


@triton.jit
def empty_kernel():
    pass


def launched(operations: set[str], backends: set[str]) -> Iterator[tuple[str, str, precompile.Variant]]:
    """(case, backend, variant): each variant with the first case that launches it."""
    device = torch.device("cpu")
    for backend in BACKENDS:
        if backend not in backends:
            continue
        seen = 0
        with precompile.collected() as found:
            for case in CASES:
                problem = case.problem
                if operations and problem.operation not in operations:
                    continue
                small: Any = problem.scaled_down()
                heads = getattr(problem, "h_q", None)
                if heads is not None:
                    small = dataclasses.replace(small, h_q=heads)
                try:
                    workloads.prepare(small, device).run(backend)
                except (ValueError, RuntimeError) as refusal:
                    print(f"{case.name} by {backend}: {refusal}")
                for variant in found[seen:]:
                    yield case.name, backend, variant
                seen = len(found)


def processor_seconds() -> float:
    usages = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(variant: precompile.Variant) -> dict[str, Any]:
    """Compile a variant into an empty cache."""
    stages: dict[str, float] = {}

    def listen(*_: Any, times: Any, **__: Any) -> None:
        stages["ir"] = times.ir_initialization / 1e6
        stages.update((name, us / 1e6) for name, us in times.lowering_stages)

    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder  # pyright: ignore[reportAttributeAccessIssue]
        triton.knobs.compilation.listener = listen  # pyright: ignore[reportAttributeAccessIssue]
        before = processor_seconds()
        variant.compile()
        seconds = processor_seconds() - before
    return {"seconds": round(seconds, 2), "stages": {name: round(time, 2) for name, time in stages.items()}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", action="append", default=[], help="only this operation (may be repeated)")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="default: all (may be repeated)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    with precompile.assuming(H100):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    variants = list(launched(set(options.op), set(options.backend or BACKENDS)))
    about = {"target": "sm_90"} | dataclasses.asdict(environment.describe(torch.device("cpu")))
    # Exclude Triton's initialization from the first kernel.
    empty_kernel.warmup(grid=(1,))
    total = 0.0
    for case, backend, variant in variants:
        result: dict[str, Any] = {"op": "compile", "kernel": variant.name, "case": case, "backend": backend} | measure(
            variant
        )
        if not result["stages"]:  # both backends launch it
            continue
        total += result["seconds"]
        stages = "  ".join(f"{name} {seconds:.2f}" for name, seconds in result["stages"].items())
        print(f"{result['seconds']:6.2f} s  {variant.name:28} {case:40} {backend:9} {stages}", flush=True)
        append_line(options.json, result | about)
    print(f"{total:.0f} s together")
    return 0
