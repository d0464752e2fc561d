"""The scripts in ``benchmarks/`` that check what they time, scaled down on a machine without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashlatte.bench.workloads import WrongResult
from flashlatte.bench.workloads.tokens import ROUNDED

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPERATIONS = {
    "cost_growth": {"dense_decode"},
    "deepseek_v4": {
        "compress",
        "q_kv_norm",
        "rotate_and_cache",
        "inverse_rope_quantize",
        "index_query",
        "mhc_pre",
        "mhc_post",
    },
    "dense_decode_caches": {"dense_decode"},
    "paged_attention": {"paged_attention"},
    "peers": {"dense_decode", "dense_prefill", "sparse_decode", "sparse_prefill"},
    "topk": {"topk", "index_select", "paged_index_select"},
    "vision": {"dense_prefill"},
    "turboquant": {"paged_attention", "turboquant_decode", "turboquant_store", "turboquant_gather"},
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(BENCHMARKS)


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


# TurboQuant's reference takes the longest of them.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name == "turboquant" else []) for name in OPERATIONS]
)
def test_a_script_checks_times_and_keeps_all_of_its_cases(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    assert script("checked").main(script(name).__doc__, script(name).SECTIONS, ["--json", str(file)]) == 0
    lines = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    assert {line["op"] for line in lines} == OPERATIONS[name]
    for line in lines:
        assert line["us"] > 0
        assert line["scaled_down"] is True
        assert line["backend"] == "reference"
        assert {"case", "method", "gbps", "device", "commit", "date"} <= set(line)
    output = capsys.readouterr()
    assert "the cases are scaled down" in output.out
    assert len(output.out.splitlines()) == 1 + len(lines)
    assert not output.err


@pytest.mark.full
def test_two_checkouts_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    checkouts = [BENCHMARKS.parent, BENCHMARKS.parent]
    options = ["--case", "write-v32-65536", "--backend", "reference", "--rounds", "2", "--warm", "2", "--least", "0"]
    options += ["--commits", "one", "other", "--json", str(file)]
    subprocess.run(
        [sys.executable, BENCHMARKS / "compare.py", *checkouts, *options],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    (line,) = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert min(line["ratio"], line["before_us"], line["after_us"], *line["ratios"]) > 0
    assert (line["before_commit"], line["commit"], line["note"]) == ("one", "other", "")


def first_cases() -> list[tuple[str, str]]:
    sections = {"deepseek_v4": ("compressor", "elementwise"), "dense_decode_caches": ("decode",)}
    sections |= {"paged_attention": ("decode", "mixed"), "topk": ("topk", "select")}
    sections |= {"turboquant": ("decode", "store", "gather")}
    return [(name, section) for name, found in sections.items() for section in found]


@pytest.mark.parametrize(("name", "section"), first_cases())
def test_a_result_that_is_not_written_is_noticed(name: str, section: str) -> None:
    known = set()
    for group in script(name).SECTIONS[section](CPU):
        for case in group:
            if case.op in known:
                continue
            known.add(case.op)
            for result in case.run("reference"):
                results = case.run("reference")
                case.check(results)
                spoiled = results[result].clone()
                spoiled.fill_(torch.nan if spoiled.is_floating_point() else torch.iinfo(spoiled.dtype).max)
                with pytest.raises(WrongResult):
                    case.check(results | {result: spoiled})


def test_wrong_results_have_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked = script("checked")
    calls = []

    def unsteady(_: str) -> dict[str, torch.Tensor]:
        calls.append(None)
        return {"out": torch.ones(2) + len(calls) * 1e-4}

    def case(op: str, run: Any) -> Any:
        return checked.Case(op, "c", run, checked.against(lambda: {"out": torch.ones(2)}, {"out": ROUNDED}), 1)

    group = [
        case("wrong", lambda _: {"out": torch.zeros(2)}),
        case("unsteady", unsteady),
        case("right", lambda _: {"out": torch.ones(2)}),
    ]
    file = tmp_path / "lines.jsonl"
    with pytest.raises(SystemExit):
        checked.main("x", {}, ["--section", "none"])
    assert checked.main("x", {"all": lambda _: [group]}, ["--json", str(file)]) == 1
    assert [json.loads(text)["op"] for text in file.read_text().splitlines()] == ["right"]
    error = capsys.readouterr().err
    assert "wrong c is wrong: out: 2 of 2 elements differ" in error
    assert "unsteady c is wrong: out: two runs differ" in error


def test_vllm_runs_in_turns_with_us_and_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, command = script("vllm_in_turns"), []

    def run(arguments: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        command.append(arguments)
        assert "FLASHLATTE_VLLM" not in env
        ours = arguments[arguments.index("--output-json") + 2 :][:2] == ["--attention-backend", "CUSTOM"]
        result = {"num_requests": 8, "elapsed_time": 2.0 if ours else 3.0}
        Path(arguments[arguments.index("--output-json") + 1]).write_text(json.dumps(result), encoding="utf-8")
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("FLASHLATTE_VLLM", "auto")
    monkeypatch.setattr(turns.subprocess, "run", run)
    turns.main(["model", "--lengths", "64,128", "--output", "30", "--prompts", "8", "--", "--block-size", "64"])
    assert ["CUSTOM" in one for one in command] == [False, True, True, False] * 2
    assert all(one[-2:] == ["--block-size", "64"] for one in command)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [[length, "8", "80", "120", "3.00", "2.00", "1.50"] for length in ("64", "128")]


def test_vllm_that_fails_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = script("vllm_in_turns")
    monkeypatch.setattr(turns.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3))
    with pytest.raises(SystemExit, match="vLLM ended with 3: vllm bench throughput --model model"):
        turns.main(["model"])
