"""A benchmark result, and the JSON lines that hold results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashlatte.bench.cases import RECORDED_COPY_GBPS, RECORDED_GPU, RECORDED_MATMUL_TFLOPS, Case
from flashlatte.bench.environment import Environment, gpu_slug
from flashlatte.bench.problems import Problem
from flashlatte.bench.timing import Ceilings

RATES = ("tflops", "gbps", "share_of_matmul", "share_of_copy", "share_of_flashmla")


@dataclass(frozen=True)
class Result:
    """The outcome of a case on a backend.

    Attributes:
        problem: the case's problem, scaled down on a machine without a GPU.
        ceilings: the chip's rates in this run; None on a machine without a GPU.
        status: "ok"; "wrong" (differs from the reference, so it has no time); "refused" by the backend; "failed".
        message: the difference, or the reason of a refusal or failure.
        microseconds: time of one call, as ``case.method`` says; only if the status is "ok".
        flops, bytes_moved: FLOPs and bytes of one call.
        gpu: its name; None on a machine without one.
    """

    case: Case
    backend: str
    problem: Problem
    ceilings: Ceilings | None
    status: str
    message: str | None = None
    microseconds: float | None = None
    flops: int | None = None
    bytes_moved: int | None = None
    gpu: str | None = None

    @property
    def tflops(self) -> float | None:
        return self._rate(self.flops, 1e6)

    @property
    def gbps(self) -> float | None:
        return self._rate(self.bytes_moved, 1e3)

    @property
    def share_of_matmul(self) -> float | None:
        return None if self.ceilings is None or self.tflops is None else self.tflops / self.ceilings.matmul_tflops

    @property
    def share_of_copy(self) -> float | None:
        return None if self.ceilings is None or self.gbps is None else self.gbps / self.ceilings.copy_gbps

    @property
    def flashmla_share_of_matmul(self) -> float | None:
        """FlashMLA's share of its own run's matmul, with FLOPs counted as here."""
        rate = self._flashmla_rate(self.flops, 1e6)
        return None if rate is None else rate / RECORDED_MATMUL_TFLOPS

    @property
    def flashmla_share_of_copy(self) -> float | None:
        """FlashMLA's share of its own run's copy, with bytes counted as here."""
        rate = self._flashmla_rate(self.bytes_moved, 1e3)
        return None if rate is None else rate / RECORDED_COPY_GBPS

    @property
    def share_of_flashmla(self) -> float | None:
        """FlashMLA's recorded time divided by this time (above 1: faster than FlashMLA), on the same model of GPU
        only."""
        recorded = self.case.recorded
        if recorded is None or self.gpu is None or gpu_slug(self.gpu) != RECORDED_GPU or self.microseconds is None:
            return None
        microseconds = recorded.microseconds or recorded.cool_microseconds
        if microseconds is not None:
            return microseconds / self.microseconds
        return self.tflops / recorded.cool_tflops if self.tflops and recorded.cool_tflops else None

    @property
    def flashmla_protocol(self) -> str | None:
        recorded = self.case.recorded
        if recorded is None:
            return None
        return "cool" if recorded.microseconds is None else "do_bench"

    def _flashmla_rate(self, amount: int | None, per: float) -> float | None:
        recorded = self.case.recorded
        if amount is None or recorded is None or recorded.microseconds is None or self.case.method == "host":
            return None
        return amount / recorded.microseconds / per

    def _rate(self, amount: int | None, per: float) -> float | None:
        if amount is None or self.microseconds is None or self.case.method == "host":
            return None
        return amount / self.microseconds / per


def json_line(result: Result, environment: Environment) -> str:
    case, ceilings = result.case, result.ceilings
    fields = {
        "op": case.operation,
        "case": case.name,
        "backend": result.backend,
        "method": case.method,
        "status": result.status,
        "message": result.message,
        "us": _rounded(result.microseconds),
        **{name: _rounded(getattr(result, name)) for name in RATES},
        "flashmla_protocol": result.flashmla_protocol,
        "flashmla": None if case.recorded is None else asdict(case.recorded),
        "matmul_tflops": _rounded(ceilings.matmul_tflops) if ceilings else None,
        "copy_gbps": _rounded(ceilings.copy_gbps) if ceilings else None,
        "scaled_down": ceilings is None,
        "problem": asdict(result.problem),
        **asdict(environment),
    }
    return json.dumps(fields, ensure_ascii=False)


def append_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def append_line(path: Path | None, line: dict[str, Any]) -> None:
    """Append one JSON line to ``path``; nothing if that is None."""
    if path is not None:
        append_text(path, json.dumps(line, ensure_ascii=False) + "\n")


def read_newest(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The newest line with a correct result for each (case, backend, device), in order of first appearance.

    Lines of other benchmarks, which may be in the same folder, have no ``problem``.
    """
    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in read_lines(paths):
        if "problem" not in line:
            continue
        key = (line["case"], line["backend"], line["device"])
        if line["status"] == "ok" and (key not in newest or line["date"] >= newest[key]["date"]):
            newest[key] = line
    return list(newest.values())


def newest_runs(lines: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Of each device the lines of its newest run: of the same commits, the newest line of each case.

    The newest run is last. Of equal dates the later line is the newer.
    """
    runs: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: line["date"]):
        run = runs.pop(line["device"], {})
        if any(one[name] != line[name] for one in run.values() for name in ("commit", "flashmla_commit")):
            run = {}
        run[line["op"], line["case"], line["method"]] = line
        runs[line["device"]] = run
    return [list(run.values()) for run in runs.values()]


def read_lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not text.strip():
                continue
            try:
                yield json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not a JSON line ({error})") from error


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
