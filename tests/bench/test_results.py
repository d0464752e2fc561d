"""Results of ``flashlatte bench`` in ``benchmarks/results``: their fields, which one of several is used, and plots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flashlatte.bench import cases, environment, results
from flashlatte.bench.timing import Ceilings

H100 = environment.Environment("NVIDIA H100 80GB HBM3", "2.11", "3.6", "0.1", "abc", "2026-11-21T00:00:00+00:00")
RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))
# Measured without a GPU.
ON_CPU = ("cache_quantization.jsonl", "compile_time.jsonl")


def result_line(
    case: cases.Case, backend: str, microseconds: float, date: str = H100.date, gpu: str = H100.device
) -> str:
    result = results.Result(
        case, backend, case.problem, Ceilings(800.0, 3000.0), "ok", None, microseconds, 10**11, 5 * 10**8, gpu
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
    elsewhere = json.loads(result_line(case, "hopper", 250.0, gpu="NVIDIA H200"))
    assert elsewhere["share_of_flashmla"] is None
    assert elsewhere["share_of_copy"] == line["share_of_copy"]


def test_flashmlas_work_is_counted_like_flashlattes() -> None:
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
    for case in (*cases.DENSE_DECODE, *cases.DENSE_PREFILL, *cases.TURBOQUANT):
        some.setdefault(case.problem.operation, case)
    for case in some.values():
        for backend, microseconds in (("hopper", 300.0), ("portable", 500.0)):
            results.append_text(file, result_line(case, backend, microseconds) + "\n")
    pictures = plot.draw([file], tmp_path / "docs")
    names = [f"bench-{operation.replace('_', '-')}.png" for operation in some]
    assert [picture.name for picture in pictures] == names
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_each_implementation_has_one_color_and_flashmla_is_marked_at_its_time(tmp_path: Path) -> None:
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
    assert {label: len(colors) for label, colors in seen.items()} == {"hopper, H100": 1, "portable, H100": 1}
    assert seen["hopper, H100"] != seen["portable, H100"]


def test_results_of_other_benchmarks_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    own = result_line(cases.CASES[0], "hopper", 20.0)
    results.append_text(file, own + '\n{"op": "topk", "case": "another benchmark\'s", "us": 1.0, "device": "x"}\n')
    assert results.read_newest([file]) == [json.loads(own)]
    assert {line["case"] for line in results.read_newest(RESULTS)} > {case.name for case in cases.SPARSE_DECODE[:3]}


@pytest.mark.parametrize("file", [file for file in RESULTS if file.name not in ON_CPU], ids=lambda file: file.name)
def test_every_recorded_line_has_a_gpu_and_a_commit(file: Path) -> None:
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        assert line["device"].startswith(("NVIDIA ", "AMD "))
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
