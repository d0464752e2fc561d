"""``flashlatte bench`` on a machine without a GPU: selection, checking before timing, result lines, pictures."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlatte import bench
from flashlatte.bench import cases, command, environment, results, runner
from flashlatte.bench.problems import (
    CacheGather,
    CacheWrite,
    DenseDecode,
    DensePrefill,
    DensePrefillBackward,
    SparseDecode,
    SparsePrefill,
    TurboQuantDecode,
    TurboQuantStore,
)
from flashlatte.bench.timing import Ceilings
from flashlatte.bench.workloads import WrongResult, prepare
from flashlatte.bench.workloads import sparse_prefill as sparse_prefill_workload
from flashlatte.ops.cache_write import reference as cache_reference
from flashlatte.ops.dense_decode import reference as dense_reference
from flashlatte.runtime import dispatch

CPU = torch.device("cpu")
SMALL_PROBLEMS = (
    DenseDecode(3, 2, 8, 100, varlen=True, causal=True),
    DenseDecode(3, 2, 8, 100, page_size=16, cache_format="fp8"),
    SparseDecode("v32", 2, 2, 8, topk=24, tokens=150, page_size=64),
    SparseDecode("model1", 2, 2, 8, 8, 64, 32, extra_topk=16, extra_tokens=60, extra_page_size=2, extra_varlen=True),
    SparsePrefill(512, 8, topk=16, s_kv=100, s_q=5),
    SparsePrefill(512, 8, topk=16, s_kv=100, s_q=5, overlap=0.5),
    DensePrefill(192, 2, 4, 40, causal=True, varlen=True),
    DensePrefillBackward(128, 2, 2, 30),
    DensePrefillBackward(128, 2, 2, 30, deterministic=True),
    CacheWrite("v32", 70),
    CacheGather("v32", 128, requests=2),
    TurboQuantDecode("turboquant_4bit_nc", 2, 40),
    TurboQuantStore("turboquant_3bit_nc", 40),
)
FIELDS = {
    "op", "case", "backend", "method", "status", "message", "us", "tflops", "gbps", "share_of_matmul", "share_of_copy",
    "share_of_flashmla", "flashmla_protocol", "flashmla", "matmul_tflops", "copy_gbps", "scaled_down", "problem",
    "device", "torch", "triton", "flashlatte", "commit", "date",
}  # fmt: skip
H100 = environment.Environment("NVIDIA H100 80GB HBM3", "2.11", "3.6", "0.1", "abc", "2026-11-21T00:00:00+00:00")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(arguments))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def test_case_names_are_unique_and_every_baseline_is_there() -> None:
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    device_cases = [case for case in cases.CASES if case.method == "device"]
    counts = {name: sum(case.operation == name and case.recorded is not None for case in device_cases) for name in (
        "dense_decode", "sparse_decode", "sparse_prefill")}  # fmt: skip
    assert counts == {"dense_decode": 30, "sparse_decode": 16, "sparse_prefill": 7}
    assert sum(case.method == "graph" for case in cases.CASES) == 8


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.recorded and case.recorded.tflops], ids=str)
def test_recorded_figures_fit_the_case(case: cases.Case) -> None:
    """2 · h_q · (d + 512) a query token and key over the recorded time is the recorded rate."""
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
    # The rates are recorded without decimals, and the varlen ones from other draws.
    assert tflops == pytest.approx(recorded.tflops, rel=0.07, abs=0.5)


@pytest.mark.parametrize("problem", SMALL_PROBLEMS, ids=lambda problem: problem.name)
def test_workload_runs_and_is_right(problem: Any) -> None:
    workload = prepare(problem, CPU)
    workload.check(workload.run("reference", workload.poisoned_outputs()))
    workload.check(workload.run("reference"))
    assert workload.bytes_moved > 0
    assert dispatch.explain(workload.call)[-1].refusal is None


@pytest.mark.parametrize("problem", SMALL_PROBLEMS, ids=lambda problem: problem.name)
def test_workload_notices_a_wrong_value(problem: Any) -> None:
    workload = prepare(problem, CPU)
    computed = workload.run("reference", workload.poisoned_outputs())
    name, result = next(iter(computed.items()))
    spoiled = result.clone()
    spoiled.flatten()[-1] += 1
    with pytest.raises(WrongResult, match=name):
        workload.check(computed | {name: spoiled})


def test_unwritten_output_is_wrong() -> None:
    workload = prepare(SMALL_PROBLEMS[0], CPU)
    with pytest.raises(WrongResult, match="NaN"):
        workload.check(workload.poisoned_outputs())


@pytest.mark.parametrize("overlap", [0.5, 0.9])
def test_neighbours_share_the_selection_that_a_case_says(overlap: float) -> None:
    problem = SparsePrefill(512, 4, topk=40, s_kv=90, s_q=12, overlap=overlap)
    workload = sparse_prefill_workload.SparsePrefillWorkload(problem, CPU)
    rows = [set(row.tolist()) for row in workload.indices[:, 0]]
    assert all(len(row) == 40 for row in rows)
    assert all(len(row & after) == 40 * overlap for row, after in itertools.pairwise(rows))


def test_work_is_counted_once_for_each_query_and_distinct_key() -> None:
    dense = prepare(DenseDecode(2, 2, 8, 100, causal=True), CPU)
    assert dense.flops == 2 * 8 * (576 + 512) * 2 * (99 + 100)
    assert dense.bytes_moved == 2 * (2 * 2 * 8 * (576 + 512) + 2 * 100 * 576)
    sparse = prepare(SparseDecode("v32", 2, 2, 8, topk=64, tokens=64, page_size=64), CPU)
    assert sparse.flops == 2 * 8 * (576 + 512) * 2 * 2 * 64
    assert sparse.bytes_moved == 2 * 2 * 2 * 8 * (576 + 512) + 2 * 64 * 656
    prefill = prepare(SparsePrefill(512, 8, topk=32, s_kv=32, s_q=5), CPU)
    assert prefill.flops == 2 * 8 * (512 + 512) * 5 * 32
    assert prefill.bytes_moved == 2 * (5 * 8 * (512 + 512) + 32 * 512)
    multi_head = prepare(DensePrefill(192, 2, 4, 40, causal=True), CPU)
    assert multi_head.flops == 2 * 4 * (192 + 128) * 2 * 40 * 40 // 2
    assert multi_head.bytes_moved == 2 * 2 * 40 * 4 * (2 * 192 + 2 * 128)
    assert prepare(DensePrefillBackward(192, 2, 4, 40), CPU).flops == 2 * 4 * (3 * 192 + 2 * 128) * 2 * 40 * 40
    assert prepare(CacheWrite("v32", 70), CPU).bytes_moved == 70 * (1152 + 656)


def test_scaled_down_run_without_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.jsonl"
    assert run("--case", "write-*", "--case", "d512-h64-*", "--json", str(file)) == 0
    written = lines(file)
    assert {line["op"] for line in written} == {"cache_write", "sparse_prefill"}
    assert all(set(line) == FIELDS for line in written)
    for line in written:
        assert line["status"] == "ok"
        assert line["backend"] == "reference"
        assert line["us"] > 0
        assert line["scaled_down"] is True
        assert line["share_of_flashmla"] is None
        assert line["share_of_copy"] is None
    output = capsys.readouterr()
    assert output.err.startswith("PyTorch sees no CUDA GPU here, so the reference runs on scaled-down cases")
    for line, case in zip(output.err.splitlines()[1:], written, strict=True):
        assert f"(scaled down from {case['case']})" in line
    assert "cache_write, scaled-down cases" in output.out
    assert "say nothing about a GPU" in output.out


def test_json_to_stdout_is_nothing_but_lines(capsys: pytest.CaptureFixture[str]) -> None:
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

    def wrong(first: torch.Tensor, *rest: Any) -> None:
        right(first, *rest)
        written = first if function == "cache_write" else rest[-2]
        written.view(-1)[0] += 1

    monkeypatch.setitem(dispatch._REGISTRY[cases_operation(case)], "portable", stand_in(cases_operation(case)))
    monkeypatch.setattr(dispatch, "implementation", lambda _, backend: wrong if backend == "portable" else right)
    file = tmp_path / "results.jsonl"
    assert run("--case", case, "--backend", "portable", "--json", str(file)) == 1
    (line,) = lines(file)
    assert line["status"] == "wrong"
    assert line["us"] is None
    assert line["message"]
    output = capsys.readouterr()
    assert "WRONG" in output.out
    assert "µs" not in output.out


def cases_operation(name: str) -> str:
    return next(case.operation for case in cases.CASES if case.name == name)


def stand_in(operation: str) -> dispatch.Implementation:
    """A second implementation that takes what the reference takes."""
    return replace(dispatch._REGISTRY[operation]["reference"], backend="portable")


def test_graph_replay_is_checked_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = SMALL_PROBLEMS[0]
    workload = prepare(problem, CPU)
    workload.call = replace(workload.call, device=torch.device("cuda"))
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(runner.timing, "capture", lambda call: (graph, call()))
    monkeypatch.setattr(runner.timing, "device_microseconds", lambda call: pytest.fail("timed a wrong result"))
    with pytest.raises(WrongResult, match="NaN"):
        runner._microseconds(cases.Case(problem, "graph"), "reference", workload)


def test_failing_case_does_not_take_the_others_with_it(
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


def test_refused_backend_is_said_and_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
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
        (("--record",), "--record keeps results of a GPU"),
    ],
)
def test_mistakes_in_the_call(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def result_line(case: cases.Case, backend: str, microseconds: float, date: str = H100.date) -> str:
    result = results.Result(
        case, backend, case.problem, Ceilings(800.0, 3000.0), "ok", None, microseconds, 10**11, 5 * 10**8
    )
    return results.json_line(result, replace(H100, date=date))


def test_shares_of_a_result() -> None:
    (case,) = (case for case in cases.CASES if case.name == "b128-sq1-h128-k4096")
    line = json.loads(result_line(case, "hopper", 250.0))
    assert line["tflops"] == pytest.approx(400)
    assert line["gbps"] == pytest.approx(2000)
    assert line["share_of_matmul"] == pytest.approx(0.5)
    assert line["share_of_copy"] == pytest.approx(2 / 3, rel=1e-4)
    assert line["share_of_flashmla"] == pytest.approx(259.3 / 250, rel=1e-4)
    assert line["scaled_down"] is False


def test_flashmlas_work_is_counted_as_ours() -> None:
    (case,) = (case for case in cases.CASES if case.name == "model1-b128-sq2-h128-top128+1024-page2-varlen")
    ours = results.Result(case, "hopper", case.problem, Ceilings(790.0, 3024.0), "ok", None, 163.6, 10**11, 5 * 10**8)
    assert ours.flashmla_share_of_matmul == pytest.approx(ours.share_of_matmul)
    assert ours.flashmla_share_of_copy == pytest.approx(ours.share_of_copy)
    half = replace(ours, microseconds=163.6 / 2)
    assert half.flashmla_share_of_copy == pytest.approx((half.share_of_copy or 0) / 2)
    assert replace(ours, case=replace(case, recorded=None)).flashmla_share_of_copy is None


def test_newest_line_counts(tmp_path: Path) -> None:
    case, file = cases.CASES[0], tmp_path / "h100.jsonl"
    for microseconds, backend, date in (
        (300.0, "hopper", "2026-11-20T00:00:00+00:00"),
        (200.0, "hopper", "2026-11-22T00:00:00+00:00"),
        (250.0, "hopper", "2026-11-21T00:00:00+00:00"),
        (400.0, "portable", "2026-11-21T00:00:00+00:00"),
    ):
        results.append_text(file, result_line(case, backend, microseconds, date) + "\n")
    newest = results.read_newest([file])
    assert [(line["backend"], line["us"]) for line in newest] == [("hopper", 200.0), ("portable", 400.0)]


@pytest.mark.full
def test_plot_draws_a_picture_for_each_operation(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    from flashlatte.bench import plot

    file = tmp_path / "h100.jsonl"
    some: dict[str, cases.Case] = {}
    for case in cases.CASES:
        some.setdefault(case.problem.operation, case)
    for case in some.values():
        for backend, microseconds in (("hopper", 300.0), ("portable", 500.0)):
            results.append_text(file, result_line(case, backend, microseconds) + "\n")
    pictures = plot.draw([file], tmp_path / "docs")
    assert [picture.name for picture in pictures] == [
        "bench-dense-decode.png",
        "bench-sparse-decode.png",
        "bench-sparse-prefill.png",
        "bench-dense-prefill.png",
        "bench-dense-prefill-backward.png",
        "bench-cache-write.png",
        "bench-cache-gather.png",
        "bench-index-logits.png",
        "bench-paged-index-logits.png",
        "bench-topk.png",
        "bench-turboquant-decode.png",
        "bench-turboquant-store.png",
    ]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_an_implementation_has_one_colour_and_flashmlas_mark_is_where_its_time_is(tmp_path: Path) -> None:
    plot = pytest.importorskip("flashlatte.bench.plot", exc_type=ImportError)
    case = cases.CASES[0]
    seen = {}
    for backends in (("hopper", "portable"), ("portable", "hopper"), ("hopper",)):
        file = tmp_path / f"{'-'.join(backends)}.jsonl"
        for backend in backends:
            results.append_text(file, result_line(case, backend, 250.0 if backend == "hopper" else 500.0) + "\n")
        rows = plot.table(results.read_newest([file]))
        figure = plot.figure(case.operation, rows)
        left = figure.axes[0]
        for bars in left.containers:
            seen.setdefault(bars.get_label(), set()).add(bars[0].get_facecolor())
        (mark,) = left.lines[0].get_xdata()
        # FlashMLA took 259.3 µs, so its mark stands left of the bar of 250 µs, as the right half has it ahead.
        bar = next(bars for bars in left.containers if "hopper" in bars.get_label())[0].get_width()
        assert mark == pytest.approx(bar * 250 / 259.3)
    assert {label: len(colours) for label, colours in seen.items()} == {"hopper, H100": 1, "portable, H100": 1}
    assert seen["hopper, H100"] != seen["portable, H100"]


def test_plot_without_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "checkout_root", lambda: tmp_path)
    assert run("--plot") == 2
    assert "no results in benchmarks/results/*.jsonl" in capsys.readouterr().err
    file = tmp_path / "benchmarks" / "results" / "h100.jsonl"
    results.append_text(file, "{ not JSON\n")
    assert run("--plot") == 2
    assert "line 1: not a JSON line" in capsys.readouterr().err


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))


def test_results_of_other_benchmarks_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    own = result_line(cases.CASES[0], "hopper", 20.0)
    results.append_text(file, own + '\n{"op": "topk", "case": "another benchmark\'s", "us": 1.0, "device": "x"}\n')
    assert results.read_newest([file]) == [json.loads(own)]
    assert {line["case"] for line in results.read_newest(RESULTS)} > {case.name for case in cases.SPARSE_DECODE[:3]}


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_every_line_that_is_kept_says_on_what_and_of_which_commit(file: Path) -> None:
    for line in lines(file):
        assert line["device"].startswith("NVIDIA ")
        assert line["commit"]


@pytest.mark.parametrize(
    ("device", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("something else", "something-else"),
    ],
)
def test_gpu_slug(device: str, slug: str) -> None:
    assert environment.gpu_slug(device) == slug


def test_commit_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "checkout_root", lambda: tmp_path)
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "0123abc-dirty")
    assert environment.commit() == "0123abc-dirty"
    monkeypatch.delenv(environment.COMMIT_VARIABLE)
    assert environment.commit() == "unknown"
