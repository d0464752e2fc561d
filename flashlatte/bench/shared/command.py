"""Several processes call kernels on one GPU: each result must be bitwise equal to the first, correct one.

    flashlatte bench shared-gpu --processes 16 --seconds 300 --random [--operation NAME ...] [--load 2]
    flashlatte bench shared-gpu [--case NAME ...] [--backend hopper] [--record FILE]

Prints each fault when it occurs, and at the end a line for each process and case. Exits with 1 if results differed or
were wrong, or a process ended or hung.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from flashlatte.bench import environment
from flashlatte.bench.results import append_line
from flashlatte.bench.shared import processes
from flashlatte.bench.shared.calls import WAYS
from flashlatte.bench.shared.options import SharedGpuOptions
from flashlatte.bench.shared.processes import Line

SECONDS_OF_A_RANDOM_CASE = 0.5
FAULTS_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known, add = SharedGpuOptions(), parser.add_argument
    add(
        "--processes",
        type=int,
        default=known.processes,
        help=f"processes that call kernels (default {known.processes})",
    )
    add("--seconds", type=float, default=known.seconds, help=f"run time of each process (default {known.seconds:g})")
    add(
        "--each",
        type=float,
        help=f"seconds of a case (default {known.each:g}; with --random {SECONDS_OF_A_RANDOM_CASE:g})",
    )
    add("--random", action="store_true", help="draw problems of random sizes instead of the cases of the bench list")
    add("--seed", type=int, default=known.seed, help="seed of the random problems (default 0)")
    add("--operation", dest="operations", metavar="NAME", action="append", help="only this operation; may be repeated")
    add("--case", dest="cases", metavar="NAME", action="append", help="only this case of the list; may be repeated")
    problem = "only this problem, written as in the message of a fault: 'TopK(rows=1, width=32768)'; may be repeated"
    add("--problem", dest="problem_reprs", metavar="PROBLEM", action="append", help=problem)
    add("--backend", help="cases that it refuses are skipped; default: the best one for each case")
    add("--streams", type=int, default=known.streams, help="CUDA streams for concurrent calls (default 2)")
    way = "way of issuing repeated calls; may be repeated (default: all, alternately)"
    add("--way", dest="ways", action="append", choices=WAYS, help=way)
    add("--load", type=int, default=0, metavar="N", help="further processes that multiply matrices (default 0)")
    add("--record", type=Path, metavar="FILE", help="append a JSON line for each line of the result")


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if a result differed or was wrong, a process ended or hung, or nothing was called."""
    options = options_of(arguments)
    lines = summaries(processes.run(options, show_faults), options)
    for line in lines:
        print(text_of(line))
    if arguments.record is not None:
        about = dataclasses.asdict(environment.describe(device()))
        about |= {"processes": options.processes, "load": options.load, "seconds": options.seconds}
        for line in lines:
            append_line(arguments.record, line | about)
    failed = {line["process"] for line in lines if line["faults"]}
    calls = sum(line["calls"] for line in lines)
    print(f"{len(failed)} of {options.processes} processes failed; {calls} calls")
    return 1 if failed or not calls else 0


def options_of(found: argparse.Namespace) -> SharedGpuOptions:
    """Raise ValueError for inconsistent options, or an unknown name or problem."""
    for name, low in (("processes", 1), ("streams", 1), ("load", 0)):
        if (value := getattr(found, name)) < low:
            raise ValueError(f"--{name} must be at least {low}, got {value}")
    for name in ("seconds", "each"):
        value = getattr(found, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be above 0 and finite, got {value:g}")
    if found.random + bool(found.cases) + bool(found.problem_reprs) > 1:
        raise ValueError("--random, --case and --problem exclude each other")
    each = found.each or (SECONDS_OF_A_RANDOM_CASE if found.random else SharedGpuOptions.each)
    options = SharedGpuOptions.of(vars(found) | {"each": each, "ways": found.ways or WAYS})
    options.labels()
    return options


def show_faults(line: Line) -> None:
    for fault in line["faults"][:FAULTS_SHOWN]:
        print(f"process {line['process']}, {line['problem']}: {fault}", flush=True)


def summaries(lines: Sequence[Line], options: SharedGpuOptions) -> list[Line]:
    """One line for each process and case; of random problems one for each process and operation.

    ``faults`` holds the problem and the first fault of every case that had some.
    """
    found: dict[tuple[int, str], Line] = {}
    for line in lines:
        label = "random" if options.random else line["case"]
        empty = {"process": line["process"], "op": line["op"], "case": label, "backends": []}
        total = found.setdefault(
            (line["process"], f"{line['op']} {label}"),
            empty | {"problems": 0, "without_memory": 0, "calls": 0, "faults": []},
        )
        total["problems"] += 1
        total["without_memory"] += line.get("no_memory", False)
        total["calls"] += line["calls"]
        if "backend" in line and line["backend"] not in total["backends"]:
            total["backends"].append(line["backend"])
        if line["faults"]:
            total["faults"].append({"problem": line["problem"], "count": len(line["faults"]), "is": line["faults"][0]})
    return list(found.values())


def text_of(line: Line) -> str:
    what = f"{line['op']} {line['case']} ({', '.join(line['backends'])})"
    memory = f", {line['without_memory']} without memory" if line["without_memory"] else ""
    state = f"{len(line['faults'])} FAILED" if line["faults"] else "correct and identical"
    return f"process {line['process']}: {what}, {line['problems']} times{memory}, {line['calls']} calls: {state}"


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
