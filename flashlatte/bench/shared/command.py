"""The command line of ``benchmarks/shared_gpu.py``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from flashlatte.bench import environment
from flashlatte.bench.results import append_text
from flashlatte.bench.shared import processes
from flashlatte.bench.shared.calls import WAYS
from flashlatte.bench.shared.options import Options
from flashlatte.bench.shared.processes import Line

SECONDS_OF_A_RANDOM_CASE = 0.5
FAULTS_SHOWN = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if bits differed, a result was wrong, a process ended or hung, or nothing was called."""
    options, record = parsed(arguments)
    lines = summaries(processes.run(options, show_faults), options)
    for line in lines:
        print(text_of(line))
    if record is not None:
        about = dataclasses.asdict(environment.describe(device()))
        about |= {"processes": options.processes, "load": options.load, "seconds": options.seconds}
        append_text(record, "".join(json.dumps(line | about, ensure_ascii=False) + "\n" for line in lines))
    failed = {line["process"] for line in lines if line["faults"]}
    calls = sum(line["calls"] for line in lines)
    print(f"{len(failed)} of {options.processes} processes failed; {calls} calls")
    return 1 if failed or not calls else 0


def parsed(arguments: Sequence[str] | None) -> tuple[Options, Path | None]:
    known = Options()
    parser = argparse.ArgumentParser(
        prog="shared_gpu.py", description="Several processes call kernels on one GPU and compare each result."
    )
    add = parser.add_argument
    add("--processes", type=int, default=known.processes, help=f"that call kernels (default {known.processes})")
    add("--seconds", type=float, default=known.seconds, help=f"that each calls (default {known.seconds:g})")
    add("--each", type=float, help=f"of one case (default {known.each:g}, random {SECONDS_OF_A_RANDOM_CASE:g})")
    add("--random", action="store_true", help="draw problems of random sizes, in place of the cases of the bench list")
    add("--seed", type=int, default=known.seed, help="of random problems (default 0)")
    add("--operation", action="append", help="only this operation; may be repeated")
    add("--case", action="append", help="only this case of the bench list; may be repeated")
    add(
        "--problem",
        action="append",
        help="only this, as a fault shows it: 'TopK(rows=1, width=32768)'; may be repeated",
    )
    add("--backend", help="default: the best that serves a case; cases that a named one refuses are passed over")
    add("--streams", type=int, default=known.streams, help="for calls at the same time (default 2)")
    add("--way", action="append", choices=WAYS, help="how calls follow each other (default: all in turns)")
    add("--load", type=int, default=0, metavar="N", help="so many more processes multiply matrices (default 0)")
    add("--record", type=Path, metavar="FILE", help="append a JSON line for each line of the result")
    found = parser.parse_args(arguments)
    if found.random + bool(found.case) + bool(found.problem) > 1:
        parser.error("--random, --case and --problem exclude each other")
    options = Options(
        processes=found.processes,
        seconds=found.seconds,
        each=found.each or (SECONDS_OF_A_RANDOM_CASE if found.random else known.each),
        random=found.random,
        seed=found.seed,
        operations=tuple(found.operation) if found.operation else None,
        cases=tuple(found.case) if found.case else None,
        given=tuple(found.problem) if found.problem else None,
        backend=found.backend,
        streams=found.streams,
        ways=tuple(found.way or known.ways),
        load=found.load,
    )
    try:
        options.labels()
    except ValueError as error:
        parser.error(str(error))
    return options, found.record


def show_faults(line: Line) -> None:
    for fault in line["faults"][:FAULTS_SHOWN]:
        print(f"process {line['process']}, {line['problem']}: {fault}", flush=True)


def summaries(lines: Sequence[Line], options: Options) -> list[Line]:
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
    state = f"{len(line['faults'])} FAILED" if line["faults"] else "right and the same"
    return f"process {line['process']}: {what}, {line['problems']} times{memory}, {line['calls']} calls: {state}"


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
