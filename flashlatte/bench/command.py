"""The command behind ``flashlatte bench``: selection of cases, and files of results."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

from flashlatte.bench import EXTRA_HINT, runner, timing
from flashlatte.bench.cases import CASES, Case
from flashlatte.bench.environment import describe, gpu_slug, in_checkout
from flashlatte.bench.results import Result, append_text, json_line
from flashlatte.runtime import dispatch

RESULTS_FOLDER = Path("benchmarks") / "results"
PICTURE_FOLDER = Path("docs")


def run(args: argparse.Namespace) -> int:
    cases = selected(args.op, args.case)
    _check_backends(args.backend)
    if args.list:
        _print_cases(cases)
        return 0
    if args.plot:
        _need("pandas", "matplotlib")
        if not args.record:
            return _plot()
    _need("rich")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = _result_files(args, device)
    results = _run(cases, args.backend, device, files, print_lines=args.json == "-")
    if args.plot:
        _plot()
    return int(any(result.status in ("wrong", "failed") for result in results))


def selected(operations: Sequence[str] | None, names: Sequence[str] | None) -> list[Case]:
    """The cases of these operations whose name matches one of these patterns; all where none are given."""
    known_operations = list(dict.fromkeys(case.operation for case in CASES))
    for operation in operations or ():
        if operation not in known_operations:
            raise ValueError(f"no operation named {operation!r} has cases; there are {', '.join(known_operations)}")
    cases = [case for case in CASES if not operations or case.operation in operations]
    for pattern in names or ():
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            near = _names_near(pattern, [case.name for case in cases])
            hint = f"; near it: {', '.join(near)}" if near else ""
            within = f" of {', '.join(operations)}" if operations else ""
            raise ValueError(f"no case{within} named {pattern!r}{hint}; --list shows all")
    return [case for case in cases if not names or any(fnmatch.fnmatchcase(case.name, name) for name in names)]


def _names_near(name: str, names: Sequence[str]) -> list[str]:
    return [known for known in names if name in known][:3] or difflib.get_close_matches(name, names, n=3)


def _run(
    cases: Sequence[Case],
    backends: Sequence[str] | None,
    device: torch.device,
    files: dict[Path, bool],
    print_lines: bool,
) -> list[Result]:
    from flashlatte.bench import report

    environment = describe(device)
    ceilings = timing.measure_ceilings(device) if device.type == "cuda" else None
    report.heading(environment, ceilings)

    def keep(result: Result) -> None:
        report.progress(result)
        line = json_line(result, environment)
        if print_lines:
            print(line, flush=True)
        for path, only_correct in files.items():
            if result.status == "ok" or not only_correct:
                append_text(path, line + "\n")

    results = runner.run(cases, backends, device, ceilings, keep)
    report.tables(results, to_stderr=print_lines)
    return results


def _result_files(args: argparse.Namespace, device: torch.device) -> dict[Path, bool]:
    """Files to append to, and whether only correct results go there."""
    files: dict[Path, bool] = {}
    if args.json and args.json != "-":
        files[Path(args.json)] = False
    if args.record:
        if device.type != "cuda":
            raise ValueError("--record needs a GPU, and PyTorch finds none")
        files[in_checkout(RESULTS_FOLDER) / f"{gpu_slug(torch.cuda.get_device_name(device))}.jsonl"] = True
    for path in files:
        try:
            append_text(path, "")
        except OSError as error:
            raise ValueError(f"results cannot be written to {path}: {error.strerror}") from error
    return files


def _plot() -> int:
    from flashlatte.bench import plot

    paths = sorted(in_checkout(RESULTS_FOLDER).glob("*.jsonl"))
    pictures = plot.draw(paths, in_checkout(PICTURE_FOLDER))
    if not pictures:
        raise ValueError(f"no results in {RESULTS_FOLDER}/*.jsonl; flashlatte bench --record on a GPU writes them")
    for picture in pictures:
        print(picture)
    return 0


def _print_cases(cases: Sequence[Case]) -> None:
    width = max(len(case.name) for case in cases)
    for operation in dict.fromkeys(case.operation for case in cases):
        print(operation)
        for case in cases:
            if case.operation == operation:
                recorded = f"FlashMLA {case.recorded.text()}" if case.recorded else ""
                print(f"  {case.name:{width}}  {recorded}".rstrip())


def _check_backends(backends: Sequence[str] | None) -> None:
    for backend in backends or ():
        if backend not in dispatch.BACKENDS:
            raise ValueError(f"no backend named {backend!r}; there are {', '.join(dispatch.BACKENDS)}")


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"this needs the extra 'bench' (missing: {', '.join(missing)}): {EXTRA_HINT}")
