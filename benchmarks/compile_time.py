"""How long each kernel of the bench list takes to compile for a GPU, present or not, and in which of Triton's stages.

    PYTHONPATH=. python benchmarks/compile_time.py [--op dense_decode] [--backend hopper] [--json FILE]

Cases run with their heads and few keys, since lengths make no variants. A kernel's time is a processor's, with that of
ptxas; those of its stages are of the clock, and so longer on a busy machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton

from flashlatte.bench import environment, workloads
from flashlatte.bench.cases import CASES
from flashlatte.runtime import machine, precompile

H100 = machine.GPU((9, 0), 132)
BACKENDS = ("hopper", "portable")


@triton.jit
def empty_kernel():
    pass


def launched(operations: set[str], backends: set[str]) -> Iterator[tuple[str, str, precompile.Variant]]:
    """(case, backend, variant): each variant beside the first case that launches it."""
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
                small = problem.scaled_down()
                if hasattr(problem, "h_q"):
                    small = dataclasses.replace(small, h_q=problem.h_q)
                try:
                    workloads.prepare(small, device).run(backend)
                except (ValueError, RuntimeError) as refusal:
                    print(f"{case.name} by {backend}: {refusal}")
                for variant in found[seen:]:
                    yield case.name, backend, variant
                seen = len(found)


def processor_seconds() -> float:
    of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in of)


def measure(variant: precompile.Variant) -> dict[str, Any]:
    """Compile a variant into an empty cache."""
    stages: dict[str, float] = {}

    def listen(*_: Any, times: Any, **__: Any) -> None:
        stages["ir"] = times.ir_initialization / 1e6
        stages.update((name, us / 1e6) for name, us in times.lowering_stages)

    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.listener = listen
        before = processor_seconds()
        variant.compile()
        seconds = processor_seconds() - before
    return {"seconds": round(seconds, 2), "stages": {name: round(time, 2) for name, time in stages.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--op", action="append", default=[], help="operation (may be repeated); all if not given")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="all if not given")
    parser.add_argument("--json", help="append one JSON line a kernel to this file")
    arguments = parser.parse_args()
    precompile.use(H100)
    variants = list(launched(set(arguments.op), set(arguments.backend or BACKENDS)))
    facts = {"target": "sm_90"} | dataclasses.asdict(environment.describe(torch.device("cpu")))
    # What Triton does once in a process is no kernel's.
    empty_kernel.warmup(grid=(1,))
    total = 0.0
    for case, backend, variant in variants:
        result = {"op": "compile", "kernel": variant.name, "case": case, "backend": backend} | measure(variant)
        if not result["stages"]:  # both backends launch it
            continue
        total += result["seconds"]
        stages = "  ".join(f"{name} {seconds:.2f}" for name, seconds in result["stages"].items())
        print(f"{result['seconds']:6.2f} s  {variant.name:28} {case:40} {backend:9} {stages}", flush=True)
        if arguments.json:
            with open(arguments.json, "a") as file:
                file.write(json.dumps(result | facts) + "\n")
    print(f"{total:.0f} s together")


if __name__ == "__main__":
    main()
