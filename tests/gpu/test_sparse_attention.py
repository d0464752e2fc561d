"""Sparse attention with gradients on a GPU: every kernel compared with the reference, and other guarantees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments
from support.gradient_calls import sparse_attention_gradients

from flashlatte import sparse_attention
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparsePrefillCase

pytestmark = pytest.mark.gpu

NAMES = ("out", "lse", "dq", "dkv", "d_sink")
GRID = harness.pairwise(
    {
        "head_dim": (576, 512),
        "h_q": (1, 3, 16, 17, 32, 64, 100, 128),
        "scope": ((20, 30), (40, 65), (700, 333), (3000, 1000)),
        "s_q": (1, 77),
        "dtype": (torch.bfloat16, torch.float16),
        "index_dtype": (torch.int32, torch.int64),
        "topk_lengths": (False, True),
        "attn_sink": (False, True),
        "duplicates": (False, True),
        "empty_rows": (0.0, 0.2),
        "strided": (False, True),
        "deterministic": (False, True),
        "with_dlse": (False, True),
    }
)
TYPICAL = SparsePrefillCase(s_q=200, s_kv=3000, h_q=64, topk=512, topk_lengths=True, empty_rows=0.05)
LARGER = (
    SparsePrefillCase(s_q=1024, s_kv=2048, h_q=128, topk=2048),
    SparsePrefillCase(s_q=500, s_kv=9000, h_q=128, topk=777, head_dim=512, topk_lengths=True, duplicates=True),
    SparsePrefillCase(s_q=300, s_kv=64, h_q=16, topk=4096, invalid_share=0.99),
)
ORACLE_CASES = (
    SparsePrefillCase(s_q=5, s_kv=900, h_q=64, topk=512, topk_lengths=True),
    SparsePrefillCase(s_q=5, s_kv=900, h_q=128, topk=256, head_dim=512),
    SparsePrefillCase(s_q=7, s_kv=300, h_q=16, topk=200, empty_rows=0.2),
)
ON_BOTH_SUMS = pytest.mark.parametrize("deterministic", [False, True])
ON_EVERY_BACKEND = pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", GRID, ids=harness.ids(GRID))
def test_against_the_reference(row: Arguments, backend: str) -> None:
    row = dict(row)
    (row["s_kv"], row["topk"]), options = (
        row.pop("scope"),
        {name: row.pop(name) for name in ("deterministic", "with_dlse")},
    )
    check(SparsePrefillCase(**row).inputs(DEVICE), backend, **options)


@ON_EVERY_BACKEND
@ON_BOTH_SUMS
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_larger_cases(case: SparsePrefillCase, deterministic: bool, backend: str) -> None:
    check(case.inputs(DEVICE), backend, deterministic=deterministic)


@ON_EVERY_BACKEND
@ON_BOTH_SUMS
def test_one_key(deterministic: bool, backend: str) -> None:
    """dq is 0, so that only its magnitude is compared."""
    inputs = SparsePrefillCase(s_q=9, s_kv=1, h_q=5, topk=1, invalid_share=0.0, attn_sink=False).inputs(DEVICE)
    _, _, dq, dkv = gradients(inputs, backend, with_dlse=False, deterministic=deterministic)
    expected = gradients(inputs, "reference", with_dlse=False)
    torch.testing.assert_close(dq, expected[2], rtol=0, atol=1e-4)
    compare.assert_close(dkv, expected[3], compare.SPARSE_ATTENTION_GRADIENT, "dkv")


@ON_EVERY_BACKEND
@ON_BOTH_SUMS
@pytest.mark.parametrize("case", ORACLE_CASES, ids=str)
def test_error_against_float64(case: SparsePrefillCase, deterministic: bool, backend: str) -> None:
    inputs = case.inputs(DEVICE)
    results = gradients(inputs, backend, with_dlse=False, deterministic=deterministic)
    oracle = sparse_attention_gradients(oracles.sparse_attention, inputs, with_dlse=False)
    baseline = sparse_attention_gradients(oracles.sparse_attention, inputs, with_dlse=False, dtype=torch.bfloat16)
    for name, result, exact, plain in zip(NAMES, results, oracle, baseline, strict=True):
        if name != "lse":
            compare.assert_accurate(result, exact, plain, name)


@ON_EVERY_BACKEND
def test_deterministic_gradients_repeat_bitwise(backend: str) -> None:
    inputs = replace(TYPICAL, s_kv=600, duplicates=True).inputs(DEVICE)
    first = gradients(inputs, backend, deterministic=True)
    for _ in range(20):
        for name, result, expected in zip(NAMES, gradients(inputs, backend, deterministic=True), first, strict=True):
            assert result.equal(expected), name


@ON_EVERY_BACKEND
@ON_BOTH_SUMS
def test_a_call_does_not_synchronize(deterministic: bool, backend: str) -> None:
    inputs = TYPICAL.inputs(DEVICE)
    leaves = {name: inputs[name].requires_grad_() for name in ("q", "kv", "attn_sink")}
    dout = torch.ones(TYPICAL.s_q, TYPICAL.h_q, 512, dtype=torch.bfloat16, device=DEVICE)

    def call() -> None:
        with harness.refusals_skip(backend):
            out, _ = sparse_attention(**inputs, deterministic=deterministic, backend=backend)
        torch.autograd.grad(out, list(leaves.values()), dout)

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ON_EVERY_BACKEND
def test_keys_beyond_2_31_elements(backend: str) -> None:
    """The last rows of a latent of 2.4 · 10^9 elements."""
    s_kv = 2**32 // 1024
    case = SparsePrefillCase(s_q=3, s_kv=64, h_q=16, topk=32)
    inputs = case.inputs(DEVICE)
    expected = gradients(inputs, backend, deterministic=True)
    kv = torch.full((s_kv, 1, 576), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    kv[-64:] = inputs["kv"]
    valid = (inputs["indices"] >= 0) & (inputs["indices"] < 64)
    moved = torch.where(valid, inputs["indices"] + s_kv - 64, -1).int()
    results = gradients(inputs | {"kv": kv, "indices": moved}, backend, deterministic=True)
    assert results[2].equal(expected[2])
    assert results[3][-64:].equal(expected[3])
    assert results[3][:-64].eq(0).all()


def gradients(inputs: Arguments, backend: str, **options: bool) -> tuple[torch.Tensor, ...]:
    with harness.refusals_skip(backend):
        return sparse_attention_gradients(sparse_attention, inputs, backend=backend, **options)


def check(inputs: Arguments, backend: str, **options: bool) -> None:
    """The forward pass must be within FlashMLA's tolerances of the reference, gradients within twice the error of plain
    bf16."""
    with_dlse = options.get("with_dlse", True)
    results = gradients(inputs, backend, **options)
    expected = gradients(inputs, "reference", with_dlse=with_dlse)
    baseline = sparse_attention_gradients(oracles.sparse_attention, inputs, with_dlse=with_dlse, dtype=torch.bfloat16)
    for name, result, wanted, plain in zip(NAMES, results, expected, baseline, strict=False):
        assert not result.isnan().any(), name
        if name == "lse":
            compare.assert_close(result, wanted, compare.SPARSE_PREFILL_LSE, name)
        elif name == "out":
            compare.assert_close(result, wanted, compare.SPARSE_PREFILL_OUT, name)
        else:
            compare.assert_accurate(result, wanted, plain, name)
