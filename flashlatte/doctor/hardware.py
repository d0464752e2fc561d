"""``flashlatte doctor --report``: whether the kernels work on this machine and how long they take, as JSON to send."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlatte.bench import environment
from flashlatte.doctor.cases import CASES
from flashlatte.doctor.private import without_private
from flashlatte.doctor.worker import CEILINGS, CaseProcess
from flashlatte.runtime import machine

# Version of the report's fields; increased when their meaning changes.
VERSION = 1


def collect(progress: Callable[[str], None] | None = None, indices: Sequence[int] | None = None) -> dict[str, Any]:
    """Run every case in another process.

    Args:
        progress: called with a line about each result; None: none.
        indices: indices in ``cases.CASES`` of the cases to run; None: all.

    Returns:
        ``environment``: GPU, driver, versions and commit. ``ceilings``: matmul and copy rates of the same run, None on
        a CPU. ``cases``: the result of ``cases.run_case`` for each case and backend. ``counts``: number of cases of
        each status. Texts contain no paths, host names or user names.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    say = progress or (lambda _: None)
    entries: list[dict[str, Any]] = []
    with CaseProcess() as worker:
        ceilings = _cleaned(worker.run({"case": CEILINGS})) if device.type == "cuda" else None
        for index in _different(device) if indices is None else indices:
            found = [_run(worker, index, backend) for backend in _backends(device)]
            # A backend that does not support the case is of interest only if no other one does.
            supported = [entry for entry in found if entry["status"] != "refused"]
            for entry in supported or found[:1]:
                entries.append(entry)
                say(_line(entry))
    return {
        "report": VERSION,
        "environment": _environment(device),
        "ceilings": ceilings,
        "scaled_down": device.type != "cuda",
        "counts": dict(Counter(entry["status"] for entry in entries)),
        "cases": entries,
    }


def summary(report: dict[str, Any]) -> str:
    """The counts of a report: "27 of 27 results are ok"."""
    counts = report["counts"]
    others = [f"{count} {status}" for status, count in counts.items() if status != "ok"]
    return ", ".join([f"{counts.get('ok', 0)} of {sum(counts.values())} results are ok", *others])


def _different(device: torch.device) -> list[int]:
    """Indices of the cases without duplicates: on a CPU, some cases are equal after they are scaled down."""
    if device.type == "cuda":
        return list(range(len(CASES)))
    small = {problem.scaled_down(): index for index, problem in reversed(list(enumerate(CASES)))}
    return sorted(small.values())


def _backends(device: torch.device) -> tuple[str, ...]:
    """The backends to run; the reference only if no kernel runs on this machine."""
    if device.type != "cuda":
        return ("portable",) if machine.interpreting() else ("reference",)
    return ("hopper", "portable") if machine.compute_capability(device) == (9, 0) else ("portable",)


def _run(worker: CaseProcess, index: int, backend: str) -> dict[str, Any]:
    problem = CASES[index]
    known = {"operation": problem.operation, "case": problem.name, "backend": backend}
    nothing = {"outputs": {}, "microseconds": None}
    return known | nothing | _cleaned(worker.run({"case": index, "backend": backend}))


def _cleaned(entry: dict[str, Any]) -> dict[str, Any]:
    message = entry.get("message")
    return entry if message is None else entry | {"message": without_private(message)}


def _environment(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = dataclasses.asdict(environment.describe(device))
    facts |= {"python": platform.python_version(), "system": sys.platform, "machine": platform.machine()}
    facts |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "interpreter": machine.interpreting()}
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "driver": _driver(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "gpus": torch.cuda.device_count(),
    }


def _driver() -> str | None:
    """The version of NVIDIA's driver, or None if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def _line(entry: dict[str, Any]) -> str:
    time = "" if entry["microseconds"] is None else f", {entry['microseconds']:,.1f} µs"
    message = "" if entry["message"] is None else f": {entry['message'].splitlines()[0]}"
    return f"{entry['operation']} {entry['case']} {entry['backend']}: {entry['status']}{time}{message}"
