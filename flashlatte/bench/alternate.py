"""Compares calls with the reference, then times them alternately; writes a JSON line for each.

On a machine without a GPU the calls are scaled down, and only test the benchmark itself: the portable kernels run in
Triton's interpreter if TRITON_INTERPRET is 1, else the reference runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashlatte.bench import environment, runner, timing
from flashlatte.bench.results import append_line
from flashlatte.bench.workloads import WrongResult
from flashlatte.bench.workloads.base import Results
from flashlatte.runtime import machine

ROUNDS = 4


@dataclass(frozen=True)
class TimedCall:
    """A call that is checked and timed.

    Attributes:
        op, name: the operation and the case.
        run: one call by a backend; returns its results by name. Repeated calls give bitwise equal results.
        check: raises WrongResult if results are wrong.
        moved: bytes read and written.
        flops: FLOPs of the matrix products; None for operations that are measured in bytes only.
        method: "device" or "graph", as in ``flashlatte bench``.
        backend: the backend that is timed on a GPU.
        more: further fields of the line.
    """

    op: str
    name: str
    run: Callable[[str], Results]
    check: Callable[[Results], None]
    moved: int
    flops: int | None = None
    method: str = "device"
    backend: str = "portable"
    more: dict[str, Any] = field(default_factory=dict)


# A section yields groups of calls; those of a group are timed alternately.
Sections = dict[str, Callable[[torch.device], Iterable[list[TimedCall]]]]


def backend_on(backend: str, device: torch.device) -> str:
    if device.type == "cuda":
        return backend
    return "portable" if machine.interpreting() else "reference"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def checked_timer(case: TimedCall, device: torch.device) -> Callable[[], float]:
    """Check that two results of a kernel are correct and bitwise equal, and return a function that times the call.

    Two results of the reference may differ: PyTorch's matmul on a CPU sums in an order that depends on free threads.
    """
    backend = backend_on(case.backend, device)
    call = functools.partial(case.run, backend)
    results = call()
    case.check(results)
    first = {name: as_bytes(result).clone() for name, result in results.items()}
    for name, result in call().items():
        if backend != "reference" and not as_bytes(result).equal(first[name]):
            raise WrongResult(f"{name}: two runs differ")
    return runner.timer(case.method, call, case.check, device)


def lines(
    groups: Iterable[list[TimedCall]],
    device: torch.device,
    ceilings: timing.Ceilings | None,
    wrong: list[str],
    rounds: int = ROUNDS,
) -> Iterator[dict[str, Any]]:
    """A line for each call with correct results; messages about the others are appended to ``wrong``."""
    about = dataclasses.asdict(environment.describe(device))
    known: set[str] = set()
    for group in groups:
        timers: list[tuple[TimedCall, Callable[[], float], list[float]]] = []
        for case in group:
            what = f"{case.op} {case.name} {case.method} {case.backend} {case.more}"
            if what in known:  # scaling down made two cases equal
                continue
            known.add(what)
            try:
                timers.append((case, checked_timer(case, device), []))
            except WrongResult as error:
                wrong.append(f"{case.op} {case.name} of {case.backend} is wrong: {error}")
        for number in range(rounds if len(timers) > 1 and device.type == "cuda" else 1):
            for _, measure, times in timers if number % 2 == 0 else reversed(timers):
                times.append(measure())
        for case, _, times in timers:
            us = statistics.median(times)
            line: dict[str, Any] = {"op": case.op, "case": case.name, "backend": backend_on(case.backend, device)}
            line |= {"method": case.method, "us": round(us, 2), "gbps": round(case.moved / us / 1e3, 1)}
            if case.flops is not None:
                line["tflops"] = round(case.flops / us / 1e6, 2)
            if ceilings is not None:
                line["share_of_copy"] = round(line["gbps"] / ceilings.copy_gbps, 3)
                if case.flops is not None:
                    line["share_of_matmul"] = round(line["tflops"] / ceilings.matmul_tflops, 3)
                line |= {name: round(value, 1) for name, value in dataclasses.asdict(ceilings).items()}
            yield line | case.more | {"scaled_down": ceilings is None} | about


def add_arguments(parser: argparse.ArgumentParser, sections: Iterable[str]) -> None:
    parser.add_argument("--section", action="append", choices=list(sections), help="default: all (may be repeated)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each call (default %(default)s)")
    add_json_option(parser)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line for each result to FILE")


def run(options: argparse.Namespace, sections: Sections) -> int:
    """Time the sections, print a line for each call and append it to ``options.json``; 1 if a result was wrong."""
    device, ceilings = begin()
    wrong: list[str] = []
    for name in options.section or sections:
        for line in lines(sections[name](device), device, ceilings, wrong, options.rounds):
            ceiling = "matmul" if "share_of_matmul" in line else "copy"
            share = "" if ceilings is None else f"{line[f'share_of_{ceiling}']:>6.2f} of {ceiling}"
            what = f"{line['op']} {line['case']}"
            print(f"{what:<72}{line['backend']:>10}{line['us']:>11.1f} µs{share}", flush=True)
            append_line(options.json, line)
    return end(wrong)


def begin() -> tuple[torch.device, timing.Ceilings | None]:
    """The device, and its rates; None without a GPU, which is printed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return device, timing.measure_ceilings(device)
    print("PyTorch finds no GPU: the cases are scaled down, and their times say nothing about a GPU")
    return device, None


def end(wrong: list[str]) -> int:
    """Print the messages about wrong results and return the exit code."""
    for message in wrong:
        print(message, file=sys.stderr)
    return 1 if wrong else 0
