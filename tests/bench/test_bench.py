"""``flashlatte bench`` without a GPU: cases, printed and recorded results, and errors in the arguments."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashlatte import bench
from flashlatte.bench import cases, command, environment, results
from flashlatte.bench.problems import (
    DenseDecode,
    SparseDecode,
    SparsePrefill,
)
from flashlatte.bench.results import read_lines
from flashlatte.bench.workloads import sparse_prefill as sparse_prefill_workload
from flashlatte.ops.cache_write import reference as cache_reference
from flashlatte.ops.dense_decode import reference as dense_reference
from flashlatte.runtime import dispatch

FIELDS = {
    "op", "case", "backend", "method", "status", "message", "us", "tflops", "gbps", "share_of_matmul", "share_of_copy",
    "share_of_flashmla", "flashmla_protocol", "flashmla", "matmul_tflops", "copy_gbps", "scaled_down", "problem",
    "device", "torch", "triton", "flashlatte", "commit", "date",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(arguments))


def test_case_names_are_unique_and_every_baseline_is_there() -> None:
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    device_cases = [case for case in cases.CASES if case.method == "device"]
    counts = {name: sum(case.operation == name and case.recorded is not None for case in device_cases) for name in (
        "dense_decode", "sparse_decode", "sparse_prefill")}  # fmt: skip
    assert counts == {"dense_decode": 30, "sparse_decode": 16, "sparse_prefill": 7}
    assert sum(case.method == "graph" and case.recorded is not None for case in cases.CASES) == 8


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.recorded and case.recorded.tflops], ids=str)
def test_recorded_figures_fit_the_case(case: cases.Case) -> None:
    """2 · h_q · (d + 512) FLOP per pair of query token and key, divided by the recorded time, is the recorded rate."""
    problem, recorded = case.problem, case.recorded
    assert recorded is not None
    if isinstance(problem, DenseDecode):
        attended = problem.batch * problem.s_q * problem.keys
    elif isinstance(problem, SparseDecode):
        extra = problem.extra_topk * (0.537 if problem.extra_varlen else 1)
        attended = problem.batch * problem.s_q * (problem.topk + extra)
    else:
        assert isinstance(problem, SparsePrefill)
        attended = problem.s_q * problem.topk
    microseconds = recorded.microseconds or recorded.cool_microseconds
    assert microseconds is not None
    tflops = 2 * problem.h_q * (problem.head_dim + 512) * attended / microseconds / 1e6
    # Rates are recorded without decimals, and the varlen ones with other random lengths.
    assert tflops == pytest.approx(recorded.tflops, rel=0.07, abs=0.5)


def test_scaled_down_run_without_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.jsonl"
    assert run("--case", "write-*", "--case", "d512-h64-*", "--json", str(file)) == 0
    written = list(read_lines([file]))
    assert {line["op"] for line in written} == {"cache_write", "sparse_prefill", "sparse_attention_backward"}
    assert all(set(line) == FIELDS for line in written)
    for line in written:
        assert line["status"] == "ok"
        assert line["backend"] == "reference"
        assert line["us"] > 0
        assert line["scaled_down"] is True
        assert line["share_of_flashmla"] is None
        assert line["share_of_copy"] is None
    output = capsys.readouterr()
    assert output.err.startswith("PyTorch finds no CUDA GPU, so the reference runs on scaled-down cases")
    for line, case in zip(output.err.splitlines()[1:], written, strict=True):
        assert f"(scaled down from {case['case']})" in line
    assert "cache_write, scaled-down cases" in output.out
    assert "say nothing about a GPU" in output.out


def test_json_on_stdout_has_only_result_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--case", "write-v32-65536", "--json", "-") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["case"] == "write-v32-65536"


@pytest.mark.parametrize(
    ("module", "function", "case"),
    [(dense_reference, "dense_decode", "b1-sq1-h16-k4096"), (cache_reference, "cache_write", "write-v32-65536")],
)
def test_wrong_result_has_no_time(
    module: Any,
    function: str,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = getattr(module, function)

    def wrong(params: Any) -> None:
        right(params)
        written = params.cache if function == "cache_write" else params.out
        written.view(-1)[0] += 1

    monkeypatch.setitem(dispatch._REGISTRY[cases_operation(case)], "portable", stand_in(cases_operation(case)))
    monkeypatch.setattr(dispatch, "implementation", lambda _, backend: wrong if backend == "portable" else right)
    file = tmp_path / "results.jsonl"
    assert run("--case", case, "--backend", "portable", "--json", str(file)) == 1
    (line,) = read_lines([file])
    assert line["status"] == "wrong"
    assert line["us"] is None
    assert line["message"]
    output = capsys.readouterr()
    assert "WRONG" in output.out
    assert "µs" not in output.out


def cases_operation(name: str) -> str:
    return next(case.operation for case in cases.CASES if case.name == name)


def stand_in(operation: str) -> dispatch.Implementation:
    """A fake second implementation with the reference's support."""
    return replace(dispatch._REGISTRY[operation]["reference"], backend="portable")


def test_a_failing_case_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_arguments: Any, **_named: Any) -> None:
        raise RuntimeError("out of memory, say\nand a long story")

    monkeypatch.setattr(sparse_prefill_workload, "sparse_prefill", broken)
    assert run("--case", "d512-h64-top512-kv8192", "--case", "write-v32-65536") == 1
    output = capsys.readouterr()
    assert "FAILED" in output.out
    assert "RuntimeError: out of memory, say" in output.out
    assert "(scaled down from write-v32-65536) reference" in output.err


def test_an_unsupported_backend_is_reported_without_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--case", "write-v32-65536", "--backend", "hopper") == 0
    output = capsys.readouterr()
    assert "REFUSED" in output.out
    assert "has no cache_write" in output.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "dense"), "no operation named 'dense' has cases; there are dense_decode, "),
        (("--case", "b128-sq1"), "no case named 'b128-sq1'; near it: b128-sq1-h128-k4096, "),
        (("--op", "sparse_prefill", "--case", "b1-*"), "no case of sparse_prefill named 'b1-*'"),
        (("--backend", "cuda"), "no backend named 'cuda'; there are hopper, portable, reference"),
        (("--json", "/dev/null/results.jsonl"), "results cannot be written to /dev/null/results.jsonl: "),
        (("--record",), "--record needs a GPU"),
    ],
)
def test_invalid_arguments_are_errors(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert run("--case", "write-v32-65536") == 2
    message = "this needs the extra 'bench' (missing: rich): pip install 'flashlatte[bench]'"
    assert message in capsys.readouterr().err


def test_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    printed = capsys.readouterr().out
    assert all(case.name in printed for case in cases.CASES)
    assert "FlashMLA 259.3 µs" in printed


def test_plot_without_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(environment, "checkout_root", lambda: tmp_path)
    assert run("--plot") == 2
    assert "no results in benchmarks/results/*.jsonl" in capsys.readouterr().err
    file = tmp_path / "benchmarks" / "results" / "h100.jsonl"
    results.append_text(file, "{ not JSON\n")
    assert run("--plot") == 2
    assert "line 1: not a JSON line" in capsys.readouterr().err
