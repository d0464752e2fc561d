"""Prints results: a line for each as it arrives, and tables at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashlatte.bench.environment import Environment
from flashlatte.bench.results import Result
from flashlatte.bench.timing import Ceilings

WIDTH_WITHOUT_TERMINAL = 150

WITHOUT_GPU = (
    "PyTorch finds no CUDA GPU, so the reference runs on scaled-down cases: this shows that the benchmark works. "
    "The times say nothing about a GPU and are not compared with anything."
)
NOTE_WITHOUT_GPU = "Scaled-down cases on the CPU: these times say nothing about a GPU."
NOTE = (
    "In brackets FlashMLA's share of the matmul and of the copy of its own run, on an H100, its work counted as ours. "
    "of FlashMLA: its recorded time over this one; above 1 is faster."
)


def heading(environment: Environment, ceilings: Ceilings | None) -> None:
    if ceilings is None:
        _stderr(WITHOUT_GPU)
        return
    _stderr(
        f"{environment.device}, torch {environment.torch}, triton {environment.triton}, commit {environment.commit}\n"
        f"In this run an 8192³ bf16 matmul reaches {ceilings.matmul_tflops:,.0f} TFLOPS and a device-to-device copy "
        f"{ceilings.copy_gbps:,.0f} GB/s (read plus written)."
    )


def progress(result: Result) -> None:
    outcome = _time(result) if result.status == "ok" else f"{result.status.upper()}: {result.message}"
    name = result.case.name if result.ceilings else f"{result.problem.name} (scaled down from {result.case.name})"
    _stderr(f"{result.case.operation} {name} {result.backend}: {outcome}")


def tables(results: Sequence[Result], *, to_stderr: bool) -> None:
    """A table for each operation, on stdout unless JSON lines are printed there."""
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console = Console(stderr=to_stderr, width=WIDTH_WITHOUT_TERMINAL)
    for operation in dict.fromkeys(result.case.operation for result in results):
        rows = [result for result in results if result.case.operation == operation]
        table = _table_without_gpu(rows) if rows[0].ceilings is None else _table(rows)
        table.title = operation if rows[0].ceilings else f"{operation}, scaled-down cases"
        console.print(table)
        for row in rows:
            if row.message:
                console.print(Text(f"{row.case.name} {row.backend}: {row.message}"))
    console.print(Text(NOTE if results[0].ceilings is not None else NOTE_WITHOUT_GPU))


def _table(results: Sequence[Result]) -> Table:
    table = _headed("case", "backend", "time", "TFLOPS", "GB/s", "of matmul", "of copy", "FlashMLA", "of FlashMLA")
    for result in results:
        recorded = result.case.recorded
        table.add_row(
            result.case.name,
            result.backend,
            _outcome(result),
            _number(result.tflops, ",.0f"),
            _number(result.gbps, ",.0f"),
            _share(result.share_of_matmul, result.flashmla_share_of_matmul),
            _share(result.share_of_copy, result.flashmla_share_of_copy),
            recorded.text() if recorded else "",
            _number(result.share_of_flashmla, ".2f"),
        )
    return table


def _table_without_gpu(results: Sequence[Result]) -> Table:
    table = _headed("scaled-down case", "scaled down from", "backend", "time")
    for result in results:
        table.add_row(result.problem.name, result.case.name, result.backend, _outcome(result))
    return table


def _headed(*columns: str) -> Table:
    table = Table(title_justify="left")
    for column in columns:
        as_text = column in ("case", "backend", "scaled-down case", "scaled down from")
        table.add_column(column, justify="left" if as_text else "right", overflow="fold")
    return table


def _outcome(result: Result) -> str:
    return _time(result) if result.status == "ok" else f"[bold red]{result.status.upper()}[/]"


def _time(result: Result) -> str:
    microseconds = result.microseconds or 0.0
    return f"{microseconds:,.1f} µs"


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _share(value: float | None, recorded: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" + (f" ({recorded:.2f})" if recorded is not None else "")


def _stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
