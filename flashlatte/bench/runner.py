"""Runs cases: draws the data, checks each backend's result, and only then times it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlatte.bench import timing
from flashlatte.bench.cases import Case
from flashlatte.bench.problems import Problem
from flashlatte.bench.results import Result
from flashlatte.bench.timing import Ceilings
from flashlatte.bench.workloads import Workload, WrongResult, prepare
from flashlatte.bench.workloads.base import Results
from flashlatte.runtime import dispatch

NO_KERNEL = "no kernel serves this case on this machine; --backend reference times the reference"


def run(
    cases: Sequence[Case],
    backends: Sequence[str] | None,
    device: torch.device,
    ceilings: Ceilings | None,
    report: Callable[[Result], None],
) -> list[Result]:
    """Run every case on every backend.

    Args:
        backends: the backends; None: all that support the case, or only the reference without a GPU.
        ceilings: measured ceilings of this run; None on a machine without a GPU, where the cases are scaled down.
        report: called with each result as soon as it is available.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    results: list[Result] = []
    workload: Workload | None = None
    drawn: Problem | None = None
    for case in cases:
        problem = case.problem if device.type == "cuda" else case.problem.scaled_down()
        if problem != drawn:
            workload, drawn = None, None
            _release()
        served = False
        for backend in backends or _default_backends(device):
            outcome: dict[str, Any]
            try:
                if workload is None:
                    workload, drawn = prepare(problem, device), problem
                outcome = _outcome(case, backend, workload)
            except Exception as error:  # a failing case must not end the run
                outcome = {"status": "failed", "message": described(error)}
            if outcome["status"] == "refused" and backends is None:
                continue
            served = True
            results.append(Result(case, backend, problem, ceilings, gpu=gpu, **outcome))
            report(results[-1])
        if not served:
            results.append(Result(case, "-", problem, ceilings, "refused", NO_KERNEL))
            report(results[-1])
    return results


def _outcome(case: Case, backend: str, workload: Workload) -> dict[str, Any]:
    """The remaining fields of a ``Result``."""
    refusal = dispatch.refusal(workload.call, backend)
    if refusal is not None:
        return {"status": "refused", "message": refusal}
    try:
        workload.check(workload.run(backend, workload.poisoned_outputs()))
        microseconds = _microseconds(case, backend, workload)
    except WrongResult as error:
        return {"status": "wrong", "message": str(error)}
    return {"status": "ok", "microseconds": microseconds, "flops": workload.flops, "bytes_moved": workload.bytes_moved}


def timer(
    method: str, call: Callable[[], Results], check: Callable[[Results], None], device: torch.device
) -> Callable[[], float]:
    """A function that times ``call`` in µs by the case's ``method``; on a CPU it times single calls.

    Raises:
        WrongResult: if ``check`` finds a CUDA graph's results wrong.
    """
    if device.type != "cuda":
        return lambda: timing.cpu_microseconds(call)
    if method == "host":
        return lambda: timing.host_microseconds(call)
    if method == "graph":
        graph, results = timing.capture(call)
        for result in results.values():
            result.fill_(torch.nan if result.is_floating_point() else torch.iinfo(result.dtype).max)
        graph.replay()
        check(results)
        return lambda: timing.device_microseconds(graph.replay) / timing.CALLS_IN_GRAPH
    return lambda: timing.device_microseconds(call)


def _microseconds(case: Case, backend: str, workload: Workload) -> float:
    return timer(case.method, lambda: workload.run(backend), workload.check, workload.call.device)()


def _default_backends(device: torch.device) -> Sequence[str]:
    if device.type != "cuda":
        return ("reference",)
    return tuple(name for name in dispatch.BACKENDS if name != "reference")


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def described(error: BaseException) -> str:
    """Its type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
