"""The benchmarks of ``flashlatte bench NAME``, scaled down, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlatte import bench
from flashlatte.bench import alternate, environment
from flashlatte.bench.pictures.command import PICTURES
from flashlatte.bench.results import read_lines
from flashlatte.bench.serving import vllm_throughput
from flashlatte.bench.workloads.base import ROUNDED, compare
from flashlatte.runtime import machine

ROOT = Path(__file__).parents[2]
PEER_SECTIONS = {
    "decode": "dense_decode",
    "decode_floors": "dense_decode",
    "decode_e4m3": "dense_decode",
    "cost_growth": "dense_decode",
    "dense_prefill": "dense_prefill",
    "sparse_decode": "sparse_decode",
    "sparse_prefill": "sparse_prefill",
    "vision": "dense_prefill",
}
# They need a GPU.
NEEDS_GPU = ("host-time", "mla-layer", "dsa-layer", "v4-layer", "engine", "distributed-decode", "distributed-layer")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", bench.NAMED)
def test_each_benchmark_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        bench.run_named(name, ["--help"])
    assert exit.value.code == 0
    assert f"flashlatte bench {name} " in capsys.readouterr().out.split("options:")[0]


def test_the_command_line_reaches_a_benchmark_with_its_options() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options = parser.parse_args(["vllm-throughput", "model", "--rounds", "2", "--", "--op", "x"])
    assert options.name == "vllm-throughput"
    assert options.arguments == ["model", "--rounds", "2", "--", "--op", "x"]
    assert parser.parse_args(["--op", "topk"]).name is None
    assert all(name in parser.format_help() for name in bench.NAMED)


@pytest.mark.parametrize("name", NEEDS_GPU)
def test_without_a_gpu_they_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.run_named(name, [])
    assert "GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "package"), [("vllm-steps", "vllm"), ("sglang-steps", "sglang")])
def test_a_missing_serving_engine_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        bench.run_named(name, ["v3"])
    assert f"error: this benchmark runs {package}, which is not installed" in capsys.readouterr().err


def test_arguments_that_a_benchmark_does_not_forward_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.run_named("shared-gpu", ["--", "x"])
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.full
def test_shared_gpu_runs_without_the_extra() -> None:
    code = "import sys, flashlatte.cli, flashlatte.bench.shared.command, flashlatte.bench.shared.worker\n"
    code += "assert not {'rich', 'pandas', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Sections with the longest references; others run the same code.
LONG = ("decode_floors", "vision")


@pytest.mark.parametrize(
    "section", [pytest.param(name, marks=[pytest.mark.full] if name in LONG else []) for name in PEER_SECTIONS]
)
def test_a_section_is_checked_timed_and_recorded(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    assert bench.run_named("peers", ["--section", section, "--json", str(file)]) == 0
    found = list(read_lines([file]))
    assert {line["op"] for line in found} == {PEER_SECTIONS[section]}
    for line in found:
        assert line["us"] > 0
        assert line["scaled_down"] is True
        assert line["backend"] == "reference"
        assert {"case", "method", "gbps", "device", "commit", "date"} <= set(line)
    output = capsys.readouterr()
    assert "the cases are scaled down" in output.out
    assert len(output.out.splitlines()) == 1 + len(found)
    assert not output.err


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_the_recorded_results(name: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    assert bench.run_named("plot", [name, "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_unknown_pictures_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["none"], ["--picture", "x.png"]):
        with pytest.raises(SystemExit):
            bench.run_named("plot", arguments)
    assert "no picture named none" in capsys.readouterr().err


@pytest.mark.full
def test_two_checkouts_are_timed_alternately(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    options = [
        "--case",
        "write-v32-65536",
        "--backend",
        "reference",
        "--rounds",
        "2",
        "--warm",
        "2",
        "--min-ratio",
        "0",
    ]
    options += ["--commits", "one", "other", "--json", str(file)]
    subprocess.run(
        [sys.executable, "-m", "flashlatte", "bench", "compare", ROOT, ROOT, *options],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    (line,) = read_lines([file])
    assert min(line["ratio"], line["before_us"], line["after_us"], *line["ratios"]) > 0
    assert (line["before_commit"], line["commit"], line["note"]) == ("one", "other", "")


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.run_named("compare", [str(ROOT), str(tmp_path / "none")])
    assert f"after must be a checkout of this repository, got {tmp_path / 'none'}" in capsys.readouterr().err


def test_wrong_results_have_no_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Results of the reference need not repeat; a kernel's must.
    monkeypatch.setattr(machine, "interpreting", lambda: True)
    calls = []

    def unsteady(_: str) -> dict[str, torch.Tensor]:
        calls.append(None)
        return {"out": torch.ones(2) + len(calls) * 1e-4}

    def check(results: dict[str, torch.Tensor]) -> None:
        compare(results, {"out": torch.ones(2)}, {"out": ROUNDED})

    def case(op: str, run: Any) -> Any:
        return alternate.TimedCall(op, "c", run, check, 1)

    group = [
        case("wrong", lambda _: {"out": torch.zeros(2)}),
        case("unsteady", unsteady),
        case("right", lambda _: {"out": torch.ones(2)}),
    ]
    file = tmp_path / "lines.jsonl"
    options = argparse.Namespace(section=None, rounds=1, json=file)
    assert alternate.run(options, {"all": lambda _: [group]}) == 1
    assert [line["op"] for line in read_lines([file])] == ["right"]
    error = capsys.readouterr().err
    assert "wrong c of portable is wrong: out: 2 of 2 elements differ" in error
    assert "unsteady c of portable is wrong: out: two runs differ" in error


def test_vllm_runs_alternately_with_flashlatte_and_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = []

    def run(arguments: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        command.append(arguments)
        assert "FLASHLATTE_VLLM" not in env
        ours = arguments[arguments.index("--output-json") + 2 :][:2] == ["--attention-backend", "CUSTOM"]
        result = {"num_requests": 8, "elapsed_time": 2.0 if ours else 3.0}
        Path(arguments[arguments.index("--output-json") + 1]).write_text(json.dumps(result), encoding="utf-8")
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("FLASHLATTE_VLLM", "auto")
    monkeypatch.setattr(vllm_throughput.subprocess, "run", run)
    bench.run_named(
        "vllm-throughput",
        ["model", "--lengths", "64,128", "--output", "30", "--prompts", "8", "--", "--block-size", "64"],
    )
    assert ["CUSTOM" in one for one in command] == [False, True, True, False] * 2
    assert all(one[-2:] == ["--block-size", "64"] for one in command)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [[length, "8", "80", "120", "3.00", "2.00", "1.50"] for length in ("64", "128")]


def test_vllm_that_fails_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_throughput.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3))
    with pytest.raises(SystemExit, match="vLLM ended with 3: vllm bench throughput --model model"):
        bench.run_named("vllm-throughput", ["model"])
