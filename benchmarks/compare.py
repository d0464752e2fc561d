"""Two checkouts timed in turns, case by case: a chip at its power limit makes whoever comes second slower.

    python benchmarks/compare.py BEFORE AFTER [--case NAME ...] [--rounds 4]

BEFORE and AFTER are checkouts of this repository. Each has a process of its own, which draws a case, checks its result
against the reference, and then times it when told: B A, A B, and so on. Whose process starts and draws first has the
other places in memory, which may show in times: half of the rounds are of a second pair of processes, in which AFTER is
first. Prints a line a case with the ratio (above 1: AFTER is faster; of the medians in each pair, and of both pairs the
geometric mean), the medians, and the ratio in each pair; and the geometric mean of all. Exits with 1 if a result was
wrong, also while processes compile side by side, or a case got slower than ``--least``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
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

SIDES = ("before", "after")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another")
    parser.add_argument("--case", action="append", help="a case, 'name' or 'name/method' (default: all)")
    parser.add_argument("--backend", default="hopper,portable", help="those to time (default hopper,portable)")
    parser.add_argument("--rounds", type=int, default=4, help="times that each is timed, half in each pair (default 4)")
    parser.add_argument("--warm", type=int, default=8, help="processes that compile beforehand (default 8)")
    parser.add_argument("--least", type=float, default=0.98, help="ratio below which a case is slower (default 0.98)")
    parser.add_argument("--json", type=Path, help="append a line a case to this file, as list_in_turns.jsonl has them")
    parser.add_argument("--commits", nargs=2, metavar=SIDES, help="what they are, if not what git says of checkouts")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.rounds % 2:
        parser.error(f"--rounds must be an even number above 0, got {arguments.rounds}")
    checkouts = {"before": arguments.before, "after": arguments.after}
    backends = arguments.backend.split(",")
    with contextlib.ExitStack() as stack:
        pairs = [
            {side: stack.enter_context(worker(checkouts[side])) for side in order} for order in (SIDES, SIDES[::-1])
        ]
        known = [pairs[0][side].ask("list") for side in SIDES]
        about = {"rounds": arguments.rounds, **environment_of(pairs[0], arguments.commits)}
        common = [name for name in known[0] if name in set(known[1])]
        wanted = [(name, backend) for name in common for backend in backends if chosen(name, arguments.case)]
        failures = compile_beforehand(checkouts, wanted, arguments.warm)
        for failure in failures:
            print(f"beside other processes: {failure}", file=sys.stderr)
        lines = []
        for _, cases in itertools.groupby(wanted, key=lambda case: case[0].partition("/")[0]):
            for line in compare(pairs, list(cases), arguments.rounds // 2):
                lines.append(line)
                print(
                    f"{line['ratio']:6.3f}  {line['before_us']:9.1f} {line['after_us']:9.1f} µs  {line['case']} "
                    f"{line['backend']}  {' '.join(f'{ratio:.3f}' for ratio in line['ratios'])} {line['note']}",
                    flush=True,
                )
                if arguments.json:
                    with arguments.json.open("a") as file:
                        # Of a wrong result the ratio and times are NaN, which JSON has not.
                        there = {key: value for key, value in line.items() if value == value}
                        file.write(json.dumps(there | about) + "\n")
    ratios = [line["ratio"] for line in lines if line["note"] == ""]
    slower = [line for line in lines if line["note"] or line["ratio"] < arguments.least]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"{len(ratios)} cases, geometric mean {mean:.4f}, {len(slower)} wrong or below {arguments.least}")
    return 1 if slower or failures or not ratios else 0


def environment_of(pair: dict[str, Worker], commits: tuple[str, str] | None) -> dict[str, Any]:
    """Where and when, and both commits: ``commits``, or what the checkouts are."""
    about = {side: one.ask("about") for side, one in pair.items()}
    before, after = commits or (about[side]["commit"] for side in SIDES)
    return about["after"] | {"before_commit": before, "commit": after}


def chosen(name: str, wanted: list[str] | None) -> bool:
    return wanted is None or name in wanted or name.partition("/")[0] in wanted


def compare(pairs: list[dict[str, Worker]], cases: list[tuple[str, str]], rounds: int) -> Iterator[dict[str, Any]]:
    """Cases of one problem on both sides, as far as both serve them; ``rounds`` in each pair of processes."""
    timed = []
    for pair in pairs:
        timed.append([time_in_turns(pair, name, backend, rounds) for name, backend in cases])
        for one in pair.values():
            one.ask("release")
    for (name, backend), outcomes in zip(cases, zip(*timed, strict=True), strict=True):
        if None in outcomes:
            continue
        notes = [outcome for outcome in outcomes if isinstance(outcome, str)]
        taken = [outcome for outcome in outcomes if isinstance(outcome, dict)] if not notes else []
        ratios = [statistics.median(times["before"]) / statistics.median(times["after"]) for times in taken]
        medians = {
            f"{side}_us": statistics.median(itertools.chain(*(times[side] for times in taken))) if taken else math.nan
            for side in SIDES
        }
        yield {
            "case": name,
            "backend": backend,
            "ratio": statistics.geometric_mean(ratios) if ratios else math.nan,
            "ratios": ratios,
            **medians,
            "note": "; ".join(dict.fromkeys(notes)),
        }


def time_in_turns(pair: dict[str, Worker], name: str, backend: str, rounds: int) -> dict[str, list[float]] | str | None:
    """A side's times in µs, who comes first in ``pair`` first in the first round; what went wrong; None: not served."""
    prepared = {side: one.ask("prepare", name, backend) for side, one in pair.items()}
    if "refused" in prepared.values():
        return None
    if wrong := [f"{side}: {state}" for side, state in prepared.items() if state != "ok"]:
        return "; ".join(wrong)
    times: dict[str, list[float]] = {side: [] for side in pair}
    for number in range(rounds):
        for side in list(pair)[:: 1 if number % 2 == 0 else -1]:
            times[side].append(pair[side].ask("time"))
    return times


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

    from flashlatte.bench import cases, environment, runner, workloads

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    known = {f"{case.problem.name}/{case.method}": case for case in cases.CASES}
    # Other output must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    nothing = (None, None)
    drawn: tuple[Any, Any] = nothing
    current: tuple[Any, str, Any] | None = None
    for line in sys.stdin:
        verb, *words = json.loads(line)
        answer: Any = None
        if verb == "list":
            answer = list(known)
        elif verb == "about":
            answer = dataclasses.asdict(environment.describe(device))
        elif verb == "release":
            current, drawn = None, nothing
            runner._release()
        elif verb == "prepare":
            name, backend = words
            case = known[name]
            problem = case.problem if device.type == "cuda" else case.problem.scaled_down()
            try:
                if drawn[0] != problem:
                    current, drawn = None, nothing
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
