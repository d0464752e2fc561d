"""Two checkouts timed in turns, case by case: a chip at its power limit makes whoever comes second slower.

    python benchmarks/compare.py BEFORE AFTER [--case NAME ...] [--rounds 4]

BEFORE and AFTER are checkouts of this repository. Each has a process of its own, which draws a case, checks its result
against the reference, and then times it when told: B A, A B, and so on. Prints a line a case with the ratio of the
medians (above 1: AFTER is faster), and their geometric mean; exits with 1 if a result was wrong, also while processes
compile side by side, or a case got slower than ``--least``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another")
    parser.add_argument("--case", action="append", help="a case, 'name' or 'name/method' (default: all)")
    parser.add_argument("--backend", default="hopper,portable", help="those to time (default hopper,portable)")
    parser.add_argument("--rounds", type=int, default=4, help="times that each is timed (default 4)")
    parser.add_argument("--warm", type=int, default=8, help="processes that compile beforehand (default 8)")
    parser.add_argument("--least", type=float, default=0.98, help="ratio below which a case is slower (default 0.98)")
    parser.add_argument("--json", type=Path, help="append a line a case to this file")
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before, "after": arguments.after}
    backends = arguments.backend.split(",")
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(worker(path)) for name, path in checkouts.items()}
        common = [name for name in workers["before"].ask("list") if name in set(workers["after"].ask("list"))]
        wanted = [(name, backend) for name in common for backend in backends if chosen(name, arguments.case)]
        failures = compile_beforehand(checkouts, wanted, arguments.warm)
        for failure in failures:
            print(f"beside other processes: {failure}", file=sys.stderr)
        lines = []
        for name, backend in wanted:
            line = compare(workers, name, backend, arguments.rounds)
            if line is None:
                continue
            lines.append(line)
            print(
                f"{line['ratio']:6.3f}  {line['before']:9.1f} {line['after']:9.1f} µs  {name} {backend} {line['note']}"
            )
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    ratios = [line["ratio"] for line in lines if line["note"] == ""]
    slower = [line for line in lines if line["note"] or line["ratio"] < arguments.least]
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"{len(ratios)} cases, geometric mean {mean:.4f}, {len(slower)} wrong or below {arguments.least}")
    return 1 if slower or failures or not ratios else 0


def chosen(name: str, wanted: list[str] | None) -> bool:
    return wanted is None or name in wanted or name.partition("/")[0] in wanted


def compare(workers: dict[str, Worker], name: str, backend: str, rounds: int) -> dict[str, Any] | None:
    """One case on both sides; None where a side does not serve it."""
    prepared = {side: workers[side].ask("prepare", name, backend) for side in workers}
    if any(state == "refused" for state in prepared.values()):
        return None
    note = "; ".join(f"{side}: {state}" for side, state in prepared.items() if state != "ok")
    times: dict[str, list[float]] = {side: [] for side in workers}
    if not note:
        for round_number in range(rounds):
            for side in sorted(workers, reverse=round_number % 2 == 0):
                times[side].append(workers[side].ask("time"))
    median = {side: statistics.median(taken) if taken else math.nan for side, taken in times.items()}
    ratio = median["before"] / median["after"]
    return {"case": name, "backend": backend, "ratio": ratio, **median, "note": note}


def compile_beforehand(checkouts: dict[str, Path], wanted: list[tuple[str, str]], processes: int) -> list[str]:
    """Let several processes fill Triton's cache, each with a share of the cases; what failed there, in words."""

    def warm(number: int) -> list[str]:
        side, path = list(checkouts.items())[number % 2]
        failures = []
        with worker(path) as one:
            for name, backend in wanted[number // 2 :: max(processes // 2, 1)]:
                state = one.ask("prepare", name, backend)
                if state not in ("ok", "refused"):
                    failures.append(f"{name} {backend}, {side}: {state}")
        return failures

    with ThreadPoolExecutor(max(processes, 1)) as pool:
        return [failure for failures in pool.map(warm, range(processes // 2 * 2)) for failure in failures]


class Worker:
    """A process that serves a checkout: a line of JSON in, a line of JSON out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, *words: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of a checkout ended while asked to {' '.join(words)}")
        return json.loads(answer)


@contextlib.contextmanager
def worker(checkout: Path) -> Iterator[Worker]:
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def serve() -> None:
    """What a worker does: the checkout on PYTHONPATH answers."""
    import torch

    from flashlatte.bench import cases, runner, workloads

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    known = {f"{case.problem.name}/{case.method}": case for case in cases.CASES}
    # Other output must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    drawn: tuple[Any, Any] = (None, None)
    current: tuple[Any, str, Any] | None = None
    for line in sys.stdin:
        verb, *words = json.loads(line)
        answer: Any
        if verb == "list":
            answer = list(known)
        elif verb == "prepare":
            name, backend = words
            case = known[name]
            problem = case.problem if device.type == "cuda" else case.problem.scaled_down()
            try:
                if drawn[0] != problem:
                    current, drawn = None, (None, None)
                    runner._release()
                    drawn = problem, workloads.prepare(problem, device)
                outcome = runner._outcome(case, backend, drawn[1])
                answer = "ok" if outcome["status"] == "ok" else outcome["status"]
                if answer not in ("ok", "refused"):
                    answer += f" {outcome['message']}"
            except Exception as error:
                answer = f"failed: {error}".splitlines()[0]
            current = case, backend, drawn[1]
        else:
            assert current is not None
            answer = runner._microseconds(*current)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main())
