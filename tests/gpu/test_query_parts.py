"""Queries of sparse attention in two tensors on a GPU: the bits of one tensor, without a join on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments, Results

import flashlatte
from flashlatte.testing import compare
from flashlatte.testing.cases import SparseDecodeCase, SparsePrefillCase

pytestmark = pytest.mark.gpu

DECODE = SparseDecodeCase(batch=9, s_q=2, s_k=1500, h_q=128, topk=640, topk_lengths="token", rope=64)
PREFILL = SparsePrefillCase(s_q=300, s_kv=2000, h_q=128, topk=512, topk_lengths=True, empty_rows=0.05, rope=64)
CASES = (
    DECODE,
    replace(DECODE, batch=2, s_q=1, h_q=16, topk_lengths="all"),
    replace(DECODE, batch=150, s_q=1, h_q=100, strided=True),
    replace(DECODE, batch=1, s_q=1, topk=2048, topk_lengths="all"),
    replace(DECODE, cache_format="bf16", head_dim=576, h_q=96),
    replace(DECODE, cache_format="bf16", head_dim=576, batch=70, s_q=3, topk_lengths="all"),
    replace(DECODE, cache_format="fp16", head_dim=576, dtype=torch.float16, h_q=8),
    replace(DECODE, cache_format="model1", extra_topk=128, extra_s_k=500),
    PREFILL,
    replace(PREFILL, s_q=5, h_q=70, strided=True),
    replace(PREFILL, dtype=torch.float16),
    # Several tokens in a tile, and tiles with NaN that are computed again.
    replace(PREFILL, s_q=511, h_q=16),
    replace(PREFILL, s_q=520, h_q=32, duplicates=True),
    replace(PREFILL, head_dim=512),
)
Case = SparseDecodeCase | SparsePrefillCase


@pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_of_joined_queries(case: Case, backend: str) -> None:
    arguments = case.inputs(DEVICE)
    results = run(case, arguments, backend)
    harness.assert_same_bits(results, run(case, joined(arguments), backend))
    expected = run(case, arguments, "reference")
    decodes = isinstance(case, SparseDecodeCase)
    out = compare.SPARSE_DECODE_OUT if decodes else compare.SPARSE_PREFILL_OUT
    for name, result in results.items():
        statistics = compare.DECODE_LSE if decodes else compare.SPARSE_PREFILL_LSE
        compare.assert_close(result, expected[name], out if name == "out" else statistics, name)


@pytest.mark.parametrize("case", [DECODE, PREFILL, replace(PREFILL, s_q=511, h_q=16)], ids=str)
def test_values_that_are_not_finite(case: Case) -> None:
    arguments = case.inputs(DEVICE)
    arguments["q_rope"][1:6, ..., 3] = torch.nan
    arguments["q"][6:9, ..., 300] = torch.inf
    results = run(case, arguments, "hopper")
    assert results["out"][1:6].isnan().any()
    harness.assert_same_bits(results, run(case, joined(arguments), "hopper"))


@pytest.mark.parametrize("unaligned", ["q", "q_rope"])
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=str)
def test_unaligned_parts(case: Case, unaligned: str) -> None:
    arguments = case.inputs(DEVICE)
    part = arguments[unaligned]
    storage = part.new_full((*part.shape[:-1], part.shape[-1] + 3), torch.nan)
    storage[..., 1:-2] = part
    results = run(case, arguments | {unaligned: storage[..., 1:-2]}, "hopper")
    harness.assert_same_bits(results, run(case, joined(arguments), "hopper"))


@pytest.mark.parametrize("case", [DECODE, replace(DECODE, batch=2, s_q=1, h_q=16), PREFILL], ids=str)
def test_a_graph_reads_both_parts(case: Case) -> None:
    arguments = case.inputs(DEVICE)
    results = run(case, arguments, "hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case, arguments, "hopper")
    graph.replay()
    harness.assert_same_bits(captured, results)
    for name in ("q", "q_rope"):
        arguments[name].mul_(-0.5)
    graph.replay()
    harness.assert_same_bits(captured, run(case, joined(arguments), "hopper"))


def joined(arguments: Arguments) -> Arguments:
    return arguments | {"q": torch.cat((arguments["q"], arguments["q_rope"]), dim=-1), "q_rope": None}


def run(case: Case, arguments: Arguments, backend: str) -> Results:
    function: Callable[..., Any] = flashlatte.sparse_decode
    names = ["out", "lse"]
    if isinstance(case, SparsePrefillCase):
        function, names = flashlatte.sparse_prefill, ["out", "max_logits", "lse"]
    with harness.refusals_skip(backend):
        return dict(zip(names, function(**arguments, backend=backend), strict=True))
