"""``flashlatte bench vllm-steps`` on a CPU; its times are not meaningful there."""

from __future__ import annotations

import argparse
import json

import pytest

from flashlatte import bench
from flashlatte.bench.serving.step_cases import PREFILLED
from flashlatte.bench.serving.vllm_engine import EngineSteps

OPTIONS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "compilation_config": {"custom_ops": ["none"]},
    # The first of many requests finishes its measured tokens before the last one is prefilled.
    "max_num_batched_tokens": 64,
}


def test_engines_are_timed_alternately(checkpoint, tmp_path, capsys):
    file = tmp_path / "steps.jsonl"
    given = [
        str(checkpoint("v2")),
        "--backends",
        "CUSTOM,CUSTOM",
        "--cases",
        "1x17,3x70,20x64",
        "--steps",
        "2",
        "--rounds",
        "2",
    ]
    given += ["--dtype", "float32", "--options", json.dumps(OPTIONS), "--json", str(file)]
    assert bench.run_named("vllm-steps", given) == 0
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["case"] for line in lines] == [case for case in ("b1-17", "b3-70", "b20-64") for _ in range(2)]
    assert all(0 < line["us_min"] <= line["us"] <= line["us_max"] for line in lines)
    assert [line["requests"] for line in lines] == [1, 1, 3, 3, 20, 20]
    assert all(line["agreement"] == {"custom": [line["requests"], 0.0]} for line in lines)
    printed = capsys.readouterr().out
    assert printed.count(" ms, ") == len(lines)
    assert "geometric mean of 6 cases" in printed


def test_contexts_are_random_keys_or_prefilled(checkpoint, tmp_path):
    file = tmp_path / "steps.jsonl"
    given = [str(checkpoint("v3", first_k_dense_replace=3)), "--backends", "CUSTOM,CUSTOM", "--cases", "1x17,3x70"]
    given += ["--random-contexts", "--prefill", "100", "--steps", "2", "--rounds", "2", "--dtype", "float32"]
    assert bench.run_named("vllm-steps", [*given, "--options", json.dumps(OPTIONS), "--json", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["case"] for line in lines] == [case for case in ("b1-17", "b3-70", "prefill-100") for _ in range(2)]
    assert all(line["agreement"] == {"custom": [line["requests"], 0.0]} for line in lines)


def test_decode_in_e4m3_is_a_backend_of_its_own(checkpoint, tmp_path):
    file = tmp_path / "steps.jsonl"
    given = [str(checkpoint("v3", first_k_dense_replace=3)), "--backends", "CUSTOM,CUSTOM+fp8", "--cases", "3x140"]
    given += ["--kv-cache-dtype", "fp8", "--steps", "2", "--rounds", "2", "--dtype", "float32"]
    assert bench.run_named("vllm-steps", [*given, "--options", json.dumps(OPTIONS), "--json", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["backend"] for line in lines] == ["custom", "custom+fp8"]
    assert 0 < lines[1]["agreement"]["custom"][1] < 0.5


@pytest.mark.parametrize(("family", "dtype", "cache"), [("v3", "float32", "fp8"), ("v32", "bfloat16", "fp8_ds_mla")])
def test_random_contexts_in_the_format_of_the_cache(checkpoint, tmp_path, family, dtype, cache):
    """And in that of the cache of index keys."""
    file = tmp_path / "steps.jsonl"
    given = [str(checkpoint(family, first_k_dense_replace=3)), "--backends", "CUSTOM,CUSTOM", "--cases", "3x140"]
    given += ["--random-contexts", "--kv-cache-dtype", cache, "--steps", "2", "--rounds", "2", "--dtype", dtype]
    assert bench.run_named("vllm-steps", [*given, "--options", json.dumps(OPTIONS), "--json", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert all(line["agreement"] == {"custom": [3, 0.0]} for line in lines)
    assert [line.get("index_logits") for line in lines] == [None if family == "v3" else "flashlatte"] * 2


def test_a_random_context_depends_on_the_request_alone(checkpoint):
    """Also after other requests, which leave their rows in the pages, and in other pages."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    given = {"cases": "1x17,3x70", "prefill": "", "random_contexts": True, "rounds": 2, "steps": 2, "memory": 0.5}
    given |= {"model": str(checkpoint("v3", first_k_dense_replace=3)), "backend": "CUSTOM", "load_format": "random"}
    given |= {"dtype": "float32", "kv_cache_dtype": "auto", "options": json.dumps(OPTIONS)}
    engine = EngineSteps(argparse.Namespace(**given))
    try:
        before = engine.tokens(3, 70)
        engine.start(3, 40)
        engine.start(1, 17)
        engine.begin(2, 60, PREFILLED)
        engine.step()
        after = engine.tokens(3, 70)
    finally:
        engine.engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    assert [[token for token, _ in one] for one in after] == [[token for token, _ in one] for one in before]
    assert len({tuple(map(tuple, one)) for one in before}) == 3
