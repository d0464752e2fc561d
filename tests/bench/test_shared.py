"""``flashlatte bench shared-gpu``: detection of changed bits, wrong results, crashes and hangs; scaled down on the
CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlatte import bench
from flashlatte.bench.problems import CacheCopy, IndexLogits, IndexSelect, MhcPre, PagedIndexLogits, TopK
from flashlatte.bench.shared import calls, command, processes, random_problems, worker
from flashlatte.bench.shared.options import SharedGpuOptions, parse
from flashlatte.bench.workloads import WrongResult, prepare

CPU = torch.device("cpu")


def caller(monkeypatch: pytest.MonkeyPatch, problem: Any, change: Any = None) -> calls.Caller:
    """A caller for one round after the first call; ``change`` may change each result."""
    workload = prepare(problem, CPU)
    run = workload.run
    if change is not None:
        monkeypatch.setattr(workload, "run", lambda *arguments: change(run(*arguments)))
    found = calls.Caller(workload, "reference", [])
    found.until(0.0, calls.WAYS)
    return found


def test_calls_that_agree_have_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = caller(monkeypatch, TopK(2, 100, 8))
    assert (found.calls, found.faults) == (1 + calls.CALLS_IN_BURST, [])


def test_undefined_logits_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = iter(range(100))

    def change(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results["logits"][0, 5:] = next(noise)
        return results

    assert not caller(monkeypatch, IndexLogits(4, 8, 8), change).faults


@pytest.mark.parametrize("first", [0, 1])
def test_changed_bits_and_wrong_values_are_reported(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(range(100))

    def change(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if next(made) >= first:
            results["logits"][:, 0] += 1.0
        return results

    faults = caller(monkeypatch, PagedIndexLogits(2, 40, heads=8), change).faults
    if first:
        assert len(faults) == 1
        assert faults[0].startswith("a burst: other bits, 2 of 80 in logits; wrong: logits: 2 of 80 elements differ")
    else:
        assert len(faults) == calls.FIRST_CALLS
        assert all(fault.startswith("the first call: wrong: logits") for fault in faults)


@pytest.mark.parametrize("problem", [TopK(2, 100, 8), CacheCopy(2), MhcPre(3, 64)], ids=lambda problem: problem.name)
def test_streams_and_graphs_are_compared_too(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fakes of CUDA streams and graphs that run immediately."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    workload = prepare(problem, CPU)
    monkeypatch.setattr(calls.timing, "capture", lambda call, _: (SimpleNamespace(replay=lambda: None), call()))
    found = calls.Caller(workload, "reference", [stream, stream])  # pyright: ignore[reportArgumentType]
    found.overlapped()
    assert (found.calls, found.faults) == (3, [])
    found.replayed()
    assert len(found.faults) == 1
    assert found.faults[0].startswith("a CUDA graph: other bits")

    def capture(call: Any, _: int) -> Any:
        results = call()

        def replay() -> None:
            for name, result in call().items():
                results[name].copy_(result)

        return SimpleNamespace(replay=replay), results

    monkeypatch.setattr(calls.timing, "capture", capture)
    found = calls.Caller(workload, "reference", [])
    found.replayed()
    assert (found.calls, found.faults) == (1 + calls.REPLAYS * calls.CALLS_IN_GRAPH, [])


def run_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: SharedGpuOptions
) -> list[Any]:
    monkeypatch.setattr(worker.sys, "stdin", io.StringIO("begin\n"))
    worker.Worker(options, 0, CPU).run()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.full
def test_a_process_continues_after_an_error_and_ends_after_a_cuda_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SharedGpuOptions(processes=1, seconds=1.0, each=0.0, cases=("r1-w32768-top2048",), backend="reference")
    messages = iter(["one", "CUDA error: misaligned address"])

    def fails(*_: Any) -> None:
        raise RuntimeError(next(messages))

    lines = run_worker(monkeypatch, capsys, options)
    assert lines[0]["begins"]
    assert lines[1] == {"ready": True}
    assert next(line["faults"] for line in lines if "faults" in line) == []
    monkeypatch.setattr(worker, "Caller", fails)
    with pytest.raises(RuntimeError, match="misaligned"):
        run_worker(monkeypatch, capsys, replace(options, seconds=60.0))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    faults = [line["faults"] for line in lines if "faults" in line]
    assert faults == [["RuntimeError: one"], ["RuntimeError: CUDA error: misaligned address"]]


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "CUDA out of memory. Tried to allocate 2 GiB"])
def test_running_out_of_memory_is_not_a_fault(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(worker, "Caller", fails)
    options = SharedGpuOptions(processes=1, seconds=0.2, cases=("r1-w32768-top2048",), backend="reference")
    lines = [line for line in run_worker(monkeypatch, capsys, options) if "faults" in line]
    assert {(line["no_memory"], *line["faults"]) for line in lines} == {(True,)}
    assert command.summaries([{"process": 0, **lines[0]}], options)[0]["without_memory"] == 1


DIES = """
import sys
print('{"ready": true}', flush=True)
sys.stdin.readline()
print('{"begins": true, "op": "topk", "case": "c", "problem": "p"}', flush=True)
print("SomeError: it died", file=sys.stderr)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("end", "fault"),
    [("sys.exit(3)", "the process ended with 3: SomeError: it died"), ("sys.stdin.read()", "the process hung: SomeEr")],
)
def test_a_crashed_or_hanging_process_is_reported_with_its_case(
    end: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "command_of", lambda *_: [sys.executable, "-c", DIES + end])
    monkeypatch.setattr(processes, "SECONDS_MORE", 1.0)
    reported: list[Any] = []
    lines = processes.run(SharedGpuOptions(processes=1, seconds=0.5), reported.append)
    assert lines == reported
    (line,) = lines
    assert (line["process"], line["op"], line["case"]) == (0, "topk", "c")
    assert line["faults"][0].startswith(fault)


@pytest.mark.full
def test_the_command_reports_a_line_for_each_process_and_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "lines.jsonl"
    arguments = ["--processes", "1", "--seconds", "0.5", "--each", "0.1", "--random", "--operation", "merge_states"]
    assert bench.run_named("shared-gpu", [*arguments, "--record", str(file)]) == 0
    (line,) = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert (line["op"], line["case"], line["faults"], line["processes"]) == ("merge_states", "random", [], 1)
    assert line["calls"] > 0
    assert "0 of 1 processes failed" in capsys.readouterr().out


def test_faults_make_the_command_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"process": 1, "op": "topk", "case": "c", "problem": "p", "calls": 5, "faults": ["a burst: other bits"]}

    def run(_: SharedGpuOptions, report: Any) -> list[Any]:
        report(line)
        return [line | {"process": 0, "faults": []}, line]

    monkeypatch.setattr(processes, "run", run)
    assert bench.run_named("shared-gpu", []) == 1
    output = capsys.readouterr().out
    assert "process 1, p: a burst: other bits" in output
    assert "process 0: topk c (), 1 times, 5 calls: correct and identical" in output
    assert "1 of 6 processes failed; 10 calls" in output
    monkeypatch.setattr(processes, "run", lambda *_: [])
    assert bench.run_named("shared-gpu", []) == 1


def test_names_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--case", "none"], ["--random", "--operation", "none"], ["--random", "--case", "x"]):
        with pytest.raises(SystemExit):
            bench.run_named("shared-gpu", arguments)
    assert "no operation or case named 'none'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("--processes", "0", "at least 1"),
        ("--streams", "-1", "at least 1"),
        ("--load", "-1", "at least 0"),
        ("--seconds", "0", "above 0 and finite"),
        ("--each", "nan", "above 0 and finite"),
    ],
)
def test_numbers_that_call_nothing_are_refused(
    option: str, value: str, accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.run_named("shared-gpu", [option, value])
    assert f"{option} must be {accepted}, got {value}" in capsys.readouterr().err


def parsed(*arguments: str) -> SharedGpuOptions:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.options_of(parser.parse_args(arguments))


def test_a_problem_is_called_as_a_fault_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    problem = IndexSelect(IndexLogits(15, 30000, 64, ranges=True), k=512)
    assert parse(repr(problem)) == problem
    options = parsed("--problem", repr(problem), "--processes", "1")
    assert next(options.problems(0)) == problem
    for text in ("IndexLogits(", "os.system('x')", "Problem(1)", "3", "TopK(rows=1)"):
        with pytest.raises(SystemExit):
            bench.run_named("shared-gpu", ["--problem", text])
        assert "problem must be like TopK(rows=1, width=32768)" in capsys.readouterr().err


def test_each_process_has_its_own_order_and_seed() -> None:
    options = SharedGpuOptions(processes=2, random=True, operations=("topk",))
    one, other = (options.problems(process) for process in range(2))
    assert [next(one) for _ in range(5)] != [next(other) for _ in range(5)]
    again = options.problems(0)
    assert next(again) == next(options.problems(0))
    listed = SharedGpuOptions(processes=2, cases=("r1-w32768-top2048", "r64-w32768-top2048"))
    assert next(listed.problems(0)) != next(listed.problems(1))
    assert listed.compiled_first(0) + listed.compiled_first(1) == [next(listed.problems(0)), next(listed.problems(1))]


@pytest.mark.parametrize("operation", random_problems.DRAWS)
def test_random_problems_run_and_are_right(operation: str) -> None:
    rng = Random(0)
    for _ in range(2):
        workload = prepare(random_problems.DRAWS[operation](rng).scaled_down(), CPU)
        results = workload.run("reference", workload.poisoned_outputs())
        workload.check(results)
    for name, result in results.items():
        spoiled = result.clone()
        spoiled.fill_(torch.nan if spoiled.is_floating_point() else torch.iinfo(spoiled.dtype).max)
        with pytest.raises(WrongResult):
            workload.check(results | {name: spoiled})
