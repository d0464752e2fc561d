"""Times two checkouts alternately, case by case, because a chip at its power limit slows down the second run.

    flashlatte bench compare BEFORE AFTER [--case NAME ...] [--rounds 4]

BEFORE and AFTER are checkouts of this repository. Each has its own process, which draws a case, checks its result
against the reference and then times it on request: B A, A B, and so on. The order of allocations can show in times, so
half of the rounds use a second pair of processes, in which AFTER starts and draws first. Prints a line per case: the
ratio (geometric mean over both pairs of the ratio of medians; above 1: AFTER is faster), the medians, and the ratio in
each pair; then the geometric mean of all cases. Exits with 1 if a result was wrong, also while processes compile
concurrently, or if a ratio is below ``--min-ratio``.
"""

from __future__ import annotations

import argparse
import contextlib
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

from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.results import append_line

SIDES = ("before", "after")
WORKER = Path(__file__).with_name("compare_worker.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="checkout of the old version")
    parser.add_argument("after", type=Path, help="checkout of the new version")
    parser.add_argument("--case", action="append", help="a case, 'name' or 'name/method' (default: all)")
    parser.add_argument(
        "--backend", default="hopper,portable", help="backends to time, separated by commas (default hopper,portable)"
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="measurements of each side, half in each pair (default 4)"
    )
    parser.add_argument("--warm", type=int, default=8, help="processes that compile beforehand (default 8)")
    parser.add_argument(
        "--min-ratio", type=float, default=0.98, help="a case with a lower ratio counts as slower (default 0.98)"
    )
    parser.add_argument("--commits", nargs=2, metavar=SIDES, help="commits to record; default: those that git reports")
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.rounds < 2 or arguments.rounds % 2:
        raise ValueError(f"--rounds must be an even number above 0, got {arguments.rounds}")
    checkouts = {"before": arguments.before, "after": arguments.after}
    for side, checkout in checkouts.items():
        if not (checkout / "flashlatte").is_dir():
            raise ValueError(f"{side} must be a checkout of this repository, got {checkout}")
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
            print(f"while other processes compiled: {failure}", file=sys.stderr)
        lines = []
        for _, cases in itertools.groupby(wanted, key=lambda case: case[0].partition("/")[0]):
            for line in compare(pairs, list(cases), arguments.rounds // 2):
                lines.append(line)
                print(
                    f"{line['ratio']:6.3f}  {line['before_us']:9.1f} {line['after_us']:9.1f} µs  {line['case']} "
                    f"{line['backend']}  {' '.join(f'{ratio:.3f}' for ratio in line['ratios'])} {line['note']}",
                    flush=True,
                )
                # A wrong result has a ratio and times of NaN, which JSON cannot represent.
                append_line(arguments.json, {key: value for key, value in line.items() if value == value} | about)
    ratios = [line["ratio"] for line in lines if line["note"] == ""]
    slower = [line for line in lines if line["note"] or line["ratio"] < arguments.min_ratio]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"{len(ratios)} cases, geometric mean {mean:.4f}, {len(slower)} wrong or below {arguments.min_ratio}")
    return 1 if slower or failures or not ratios else 0


def environment_of(pair: dict[str, CheckoutProcess], commits: tuple[str, str] | None) -> dict[str, Any]:
    """The environment and both commits: ``commits``, or those of the checkouts."""
    about = {side: one.ask("about") for side, one in pair.items()}
    before, after = commits or (about[side]["commit"] for side in SIDES)
    return about["after"] | {"before_commit": before, "commit": after}


def chosen(name: str, wanted: list[str] | None) -> bool:
    return wanted is None or name in wanted or name.partition("/")[0] in wanted


def compare(
    pairs: list[dict[str, CheckoutProcess]], cases: list[tuple[str, str]], rounds: int
) -> Iterator[dict[str, Any]]:
    """Time the cases of one problem that both sides support, ``rounds`` times in each pair of processes."""
    timed = []
    for pair in pairs:
        timed.append([time_alternately(pair, name, backend, rounds) for name, backend in cases])
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


def time_alternately(
    pair: dict[str, CheckoutProcess], name: str, backend: str, rounds: int
) -> dict[str, list[float]] | str | None:
    """Times of each side in µs, in the order of ``pair``; a message if a result is wrong; None if not supported."""
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
    """Fill Triton's cache with several processes, each with a share of the cases; returns messages of failures."""

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


class CheckoutProcess:
    """A process that times a checkout: a line of JSON in, a line of JSON out."""

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
def worker(checkout: Path) -> Iterator[CheckoutProcess]:
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    command = [sys.executable, "-c", WORKER.read_text(encoding="utf-8")]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout
    ) as process:
        try:
            yield CheckoutProcess(process)
        finally:
            process.kill()
