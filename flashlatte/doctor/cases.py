"""The cases of ``flashlatte doctor --report``, which fit a GPU of 8 GiB, and a run of one of them."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashlatte.bench import problems, timing
from flashlatte.bench.problems import Problem
from flashlatte.bench.workloads import Workload, WrongResult, prepare
from flashlatte.bench.workloads.base import Results
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import deviation

# Sparse MLA first: what vLLM's plugin and the layers run for a model with an indexer.
CASES: tuple[Problem, ...] = (
    problems.SparseDecode("v32", 16, 1, 16, topk=2048, tokens=4096, page_size=64),
    problems.SparseDecode("v32", 16, 2, 128, topk=2048, tokens=4096, page_size=64),
    problems.SparseDecode("bf16", 16, 1, 16, topk=2048, tokens=4096, page_size=64),
    problems.SparseDecode("bf16", 16, 2, 128, topk=2048, tokens=4096, page_size=64),
    problems.SparseDecode("model1", 16, 1, 64, topk=128, tokens=4096, page_size=256, extra_topk=512, extra_tokens=4096),
    problems.SparsePrefill(576, 16, 2048, 8192, s_q=512),
    problems.SparsePrefill(576, 128, 2048, 8192, s_q=512),
    problems.SparsePrefill(512, 64, 512, 8192, s_q=512),
    problems.IndexQuery(512),
    problems.IndexQuantize(8192),
    problems.IndexGather(4, 8192),
    problems.IndexLogits(512, 8192, 64),
    problems.PagedIndexLogits(16, 8192),
    problems.TopK(16, 32768),
    problems.TopK(512, 8192),
    problems.IndexConvert(16, 8192),
    problems.CacheWrite("v32", 8192),
    problems.CacheWrite("bf16", 8192),
    problems.CacheGather("v32", 8192),
    problems.ConcatMlaQ(64),
    problems.LatentRows(64),
    problems.RotateHeads(64),
    problems.DenseDecode(16, 1, 16, 4096),
    problems.DenseDecode(16, 2, 128, 4096, causal=True),
    problems.DenseDecode(16, 1, 16, 4096, cache_format="fp8"),
    problems.DensePrefill(192, 1, 16, 4096, causal=True),
    problems.MergeStates(512),
)


def run_case(problem: Problem, backend: str, device: torch.device) -> dict[str, Any]:
    """Check the results of a problem on a backend against the reference, and time it on a GPU.

    Returns:
        operation, case, backend; ``status``: "ok", "wrong" (with the difference as ``message``), "refused" by the
        backend (with its reason) or "failed" (with the exception); ``outputs``: for each result, the ``error`` of the
        element that comes closest to its tolerance or exceeds it most, and the ``allowed`` error of this element;
        ``microseconds``: median of a call on the device, None on a CPU and for a result that is not ok.
    """
    entry: dict[str, Any] = {"operation": problem.operation, "case": problem.name, "backend": backend}
    entry |= {"status": "ok", "message": None, "outputs": {}, "microseconds": None}
    try:
        workload = prepare(problem, device)
        refusal = dispatch.refusal(workload.call, backend)
        if refusal is not None:
            return entry | {"status": "refused", "message": f"it {refusal}"}
        results = workload.run(backend, workload.poisoned_outputs())
        entry["outputs"] = _errors(workload, results)
        workload.check(results)
        if device.type == "cuda":
            entry["microseconds"] = round(timing.device_microseconds(lambda: workload.run(backend)), 2)
    except WrongResult as error:
        entry |= {"status": "wrong", "message": str(error)}
    except Exception as error:  # any failure is part of the report
        entry |= {"status": "failed", "message": f"{type(error).__name__}: {error}"}
    return entry


def _errors(workload: Workload, results: Results) -> dict[str, dict[str, float | None]]:
    actual = workload.compared(workload.defined(results))
    errors = {}
    for name, tolerance in workload.tolerances.items():
        error, allowed = deviation(actual[name], workload.expected[name], tolerance)
        errors[name] = {"error": error if math.isfinite(error) else None, "allowed": allowed}
    return errors
