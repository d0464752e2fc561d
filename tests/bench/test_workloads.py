"""The workload of a benchmark case: its check, which precedes the timing, and the FLOPs and bytes it reports."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlatte.bench import cases, runner
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
from flashlatte.bench.workloads import WrongResult, prepare
from flashlatte.bench.workloads import sparse_prefill as sparse_prefill_workload
from flashlatte.runtime import dispatch

CPU = torch.device("cpu")
SMALL_PROBLEMS = (
    DenseDecode(3, 2, 8, 100, varlen=True, causal=True),
    DenseDecode(3, 2, 8, 100, page_size=16, cache_format="fp8"),
    DenseDecode(3, 1, 8, 100, uneven=(30, 7)),
    SparseDecode("v32", 2, 2, 8, topk=24, tokens=150, page_size=64),
    SparseDecode("v41_fp4", 2, 2, 8, topk=24, tokens=150, page_size=64),
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


@pytest.mark.parametrize("problem", SMALL_PROBLEMS, ids=lambda problem: problem.name)
def test_workload_runs_and_is_right(problem: Any) -> None:
    workload = prepare(problem, CPU)
    workload.check(workload.run("reference", workload.poisoned_outputs()))
    workload.check(workload.run("reference"))
    assert workload.bytes_moved > 0
    assert dispatch.explain(workload.call)[-1].refusal is None


def test_call_of_a_turboquant_decode_has_its_heads() -> None:
    problem = TurboQuantDecode("turboquant_4bit_nc", 2, 40)
    call = prepare(problem, CPU).call
    assert (call.h_q, call.h_kv, call.index_dim) == (problem.h_q, problem.h_kv, None)


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
def test_adjacent_tokens_share_the_cases_fraction_of_selections(overlap: float) -> None:
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


def test_graph_replay_is_checked_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = SMALL_PROBLEMS[0]
    workload = prepare(problem, CPU)
    workload.call = replace(workload.call, device=torch.device("cuda"))
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(runner.timing, "capture", lambda call: (graph, call()))
    monkeypatch.setattr(runner.timing, "device_microseconds", lambda call: pytest.fail("timed a wrong result"))
    with pytest.raises(WrongResult, match="NaN"):
        runner._microseconds(cases.Case(problem, "graph"), "reference", workload)
