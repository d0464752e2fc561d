"""benchmarks/vllm_steps.py, on a CPU: whether it runs; its times say nothing there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
OPTIONS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "compilation_config": {"custom_ops": ["none"]},
}


def test_engines_take_turns(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("vllm_steps")
    file = tmp_path / "steps.jsonl"
    given = [
        str(checkpoint("v2")),
        "--backends",
        "CUSTOM,CUSTOM",
        "--cases",
        "1x17,3x70",
        "--steps",
        "2",
        "--rounds",
        "2",
    ]
    given += ["--dtype", "float32", "--options", json.dumps(OPTIONS), "--json", str(file)]
    script.main(given)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["case"] for line in lines] == ["b1-17", "b1-17", "b3-70", "b3-70"]
    assert all(0 < line["us_min"] <= line["us"] <= line["us_max"] for line in lines)
    assert capsys.readouterr().out.count("ms a step") == len(lines)
