"""What benchmarks of single operations share: a call is compared with the reference, timed, and becomes a line.

On a machine without a GPU the cases are scaled down: the portable kernels run in Triton's interpreter where
TRITON_INTERPRET is 1, else the reference does, and only the benchmark itself is tried.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashlatte.bench import environment, runner, timing
from flashlatte.bench.problems import Problem
from flashlatte.bench.workloads import WrongResult, prepare
from flashlatte.bench.workloads.base import Results
from flashlatte.runtime import machine
from flashlatte.testing.compare import Tolerance, assert_close

ROUNDS = 4


@dataclass(frozen=True)
class Case:
    """A call that is checked and timed.

    Attributes:
        op, name: the operation, and what it is called with.
        run: one call by a backend; its results by name. Called again it gives the same.
        check: raises WrongResult if results are wrong.
        moved: bytes read and written.
        flops: of matrix products; None where the bytes alone are looked at.
        method: "device" or "graph", as in ``flashlatte bench``.
        backend: the one that is timed on a GPU.
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


Sections = dict[str, Callable[[torch.device], Iterable[list[Case]]]]


def of_problem(problem: Problem, device: torch.device, **options: Any) -> Case:
    """A problem of ``flashlatte bench``, with its data and its check. ``options``: further attributes of the case."""
    problem = problem if device.type == "cuda" else problem.scaled_down()
    workload = prepare(problem, device)
    return Case(
        problem.operation, problem.name, workload.run, workload.check, workload.bytes_moved, workload.flops, **options
    )


def against(
    reference: Callable[[], Results],
    tolerances: dict[str, Tolerance],
    read: Callable[[Results], Results] = lambda results: results,
) -> Callable[[Results], None]:
    """A check: what ``read`` makes of results is ``reference``'s within the tolerances."""
    expected = functools.cache(reference)

    def check(results: Results) -> None:
        found = read(results)
        for name, tolerance in tolerances.items():
            try:
                assert_close(found[name], expected()[name], tolerance, name)
            except AssertionError as error:
                raise WrongResult(str(error)) from error

    return check


def backend_on(backend: str, device: torch.device) -> str:
    if device.type == "cuda":
        return backend
    return "portable" if machine.interpreting() else "reference"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def checked_timer(case: Case, device: torch.device) -> Callable[[], float]:
    """What times the case, once its results are right, and the same bits twice."""
    call = functools.partial(case.run, backend_on(case.backend, device))
    results = call()
    case.check(results)
    first = {name: bits(result).clone() for name, result in results.items()}
    for name, result in call().items():
        if not bits(result).equal(first[name]):
            raise WrongResult(f"{name}: two runs differ")
    return runner.timer(case.method, call, case.check, device)


def lines(
    groups: Iterable[list[Case]],
    device: torch.device,
    ceilings: timing.Ceilings | None,
    wrong: list[str],
    rounds: int = ROUNDS,
) -> Iterator[dict[str, Any]]:
    """A line for each case whose results are right; the cases of a group take turns, in so many rounds. ``wrong`` gets
    the others."""
    about = dataclasses.asdict(environment.describe(device))
    known: set[str] = set()
    for group in groups:
        timers: list[tuple[Case, Callable[[], float], list[float]]] = []
        for case in group:
            what = f"{case.op} {case.name} {case.backend} {case.more}"
            if what in known:  # which scaling down has made alike
                continue
            known.add(what)
            try:
                timers.append((case, checked_timer(case, device), []))
            except WrongResult as error:
                wrong.append(f"{case.op} {case.name} is wrong: {error}")
        for turn in range(rounds if len(timers) > 1 and device.type == "cuda" else 1):
            for _, measure, times in timers if turn % 2 == 0 else reversed(timers):
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


def main(description: str, sections: Sections, arguments: list[str] | None = None, rounds: int = ROUNDS) -> int:
    """Run a benchmark's command line; returns 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("--section", action="append", choices=list(sections), help="all if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line for each case to this file")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = timing.measure_ceilings(device) if device.type == "cuda" else None
    if ceilings is None:
        print("PyTorch sees no GPU: the cases are scaled down, and their times say nothing about one")
    wrong: list[str] = []
    for name in options.section or sections:
        for line in lines(sections[name](device), device, ceilings, wrong, rounds):
            ceiling = "matmul" if "share_of_matmul" in line else "copy"
            share = "" if ceilings is None else f"{line[f'share_of_{ceiling}']:>6.2f} of {ceiling}"
            more = " ".join(str(line[key]) for key in ("rows", "variant") if key in line)
            what = f"{line['op']} {line['case']} {more}"
            print(f"{what:<72}{line['backend']:>10}{line['us']:>11.1f} µs{share}", flush=True)
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    for message in wrong:
        print(message, file=sys.stderr)
    return 1 if wrong else 0
