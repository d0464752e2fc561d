"""The indexer's loss on a GPU: its kernels compared with the reference, and other guarantees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments
from support.indexer_loss_calls import LEAVES, NAMES, arguments, with_gradients

from flashlatte import indexer_loss
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparsePrefillCase

pytestmark = pytest.mark.gpu

GRID = harness.pairwise(
    {
        "head_dim": (576, 512, 48),
        "h_q": (1, 3, 16, 17, 32, 64, 100, 128),
        "h_i": (1, 3, 16, 32, 64, 100),
        "index_dim": (128, 64, 40),
        "scope": ((20, 30), (40, 65), (700, 333), (3000, 1000)),
        "s_q": (1, 77, 300),
        "dtype": (torch.bfloat16, torch.float16),
        "weights_dtype": (None, torch.float32),
        "index_dtype": (torch.int32, torch.int64),
        "topk_lengths": (False, True),
        "duplicates": (False, True),
        "empty_rows": (0.0, 0.2),
        "strided": (False, True),
        "use_relu": (True, False),
        "deterministic": (False, True),
        "dense": (False, True),
    }
)
TYPICAL = SparsePrefillCase(s_q=200, s_kv=3000, h_q=64, topk=512, topk_lengths=True, empty_rows=0.05)
INDEXER: Any = {"h_i": 64, "index_dim": 128, "device": DEVICE}
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
ON_BOTH_STAGES = pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
ON_BOTH_SUMS = pytest.mark.parametrize("deterministic", [False, True])
ON_EVERY_BACKEND = pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", GRID, ids=harness.ids(GRID))
def test_against_the_reference(row: Arguments, backend: str) -> None:
    row = dict(row)
    row["s_kv"], row["topk"] = row.pop("scope")
    row["d_v"] = min(row["head_dim"], 512)
    sizes = {name: row.pop(name) for name in ("h_i", "index_dim", "weights_dtype", "dense")}
    options = {name: row.pop(name) for name in ("use_relu", "deterministic")}
    check(arguments(SparsePrefillCase(**row), **sizes, device=DEVICE), backend, **options)


@ON_EVERY_BACKEND
@ON_BOTH_STAGES
@ON_BOTH_SUMS
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_larger_cases(case: SparsePrefillCase, deterministic: bool, dense: bool, backend: str) -> None:
    check(arguments(case, dense, **INDEXER), backend, deterministic=deterministic)


@ON_EVERY_BACKEND
@ON_BOTH_STAGES
@pytest.mark.parametrize("case", ORACLE_CASES, ids=str)
def test_error_against_float64(case: SparsePrefillCase, dense: bool, backend: str) -> None:
    given = arguments(case, dense, **INDEXER)
    with harness.refusals_skip(backend):
        results = with_gradients(indexer_loss, given, backend=backend)
    exact = with_gradients(oracles.indexer_loss, given)
    plain = with_gradients(oracles.indexer_loss, given, dtype=torch.bfloat16)
    assert results[1] == exact[1]
    for name, result, oracle, baseline in zip(NAMES, results, exact, plain, strict=True):
        if name != "num_rows":
            compare.assert_accurate(result, oracle, baseline, name)


@ON_EVERY_BACKEND
@ON_BOTH_STAGES
def test_results_repeat_bitwise(dense: bool, backend: str) -> None:
    given = arguments(replace(TYPICAL, s_kv=600, duplicates=True), dense, **INDEXER)
    with harness.refusals_skip(backend):
        first = with_gradients(indexer_loss, given, backend=backend, deterministic=not dense)
    for _ in range(20):
        again = with_gradients(indexer_loss, given, backend=backend, deterministic=not dense)
        for name, result, expected in zip(NAMES, again, first, strict=True):
            assert result.equal(expected), name


@ON_BOTH_STAGES
@ON_BOTH_SUMS
def test_a_call_does_not_synchronize(dense: bool, deterministic: bool) -> None:
    given = arguments(TYPICAL, dense, **INDEXER)
    leaves = [given[name].requires_grad_() for name in LEAVES]

    def call() -> None:
        loss, num_rows = indexer_loss(**given, deterministic=deterministic)
        torch.autograd.grad(loss / num_rows, leaves)

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_of_the_warm_up_is_bounded() -> None:
    """Memory for 32,768 tokens, in addition to arguments and gradients; [s_q, s_kv] in bf16 would be 2 GiB."""
    tokens = 32768
    index_q = torch.randn(tokens, 4, 128, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    index_k = torch.randn(tokens, 128, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    weights = torch.randn(tokens, 4, device=DEVICE).requires_grad_()
    q = torch.randn(tokens, 4, 576, dtype=torch.bfloat16, device=DEVICE)
    kv = torch.randn(tokens, 1, 576, dtype=torch.bfloat16, device=DEVICE)
    end = torch.arange(1, tokens + 1, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, _ = indexer_loss(index_q, index_k, weights, q, kv, key_start=torch.zeros_like(end), key_end=end)
    loss.backward()
    torch.cuda.synchronize()
    assert loss.isfinite()
    assert torch.cuda.max_memory_allocated() - before < 512 << 20


@ON_EVERY_BACKEND
def test_everything_but_the_gradient_of_index_k_repeats_bitwise(backend: str) -> None:
    given = arguments(TYPICAL, False, **INDEXER)
    with harness.refusals_skip(backend):
        first = with_gradients(indexer_loss, given, backend=backend)
    for _ in range(20):
        for name, result, expected in zip(
            NAMES, with_gradients(indexer_loss, given, backend=backend), first, strict=True
        ):
            assert name == "d_index_k" or result.equal(expected), name


@ON_EVERY_BACKEND
def test_keys_beyond_2_31_elements(backend: str) -> None:
    """The last rows of a latent of 2.4 · 10^9 elements."""
    s_kv = 2**32 // 1024
    case = SparsePrefillCase(s_q=3, s_kv=64, h_q=16, topk=32)
    given = arguments(case, False, **INDEXER)
    with harness.refusals_skip(backend):
        wanted = with_gradients(indexer_loss, given, backend=backend, deterministic=True)
        without_order = with_gradients(indexer_loss, given, backend=backend)
    moved = {}
    for name in ("kv", "index_k"):
        moved[name] = given[name].new_full((s_kv, *given[name].shape[1:]), torch.nan)
        moved[name][-64:] = given[name]
    valid = (given["indices"] >= 0) & (given["indices"] < 64)
    moved["indices"] = torch.where(valid, given["indices"] + s_kv - 64, -1).int()
    moved = given | moved
    results = with_gradients(indexer_loss, moved, backend=backend, deterministic=True)
    torch.testing.assert_close(
        with_gradients(indexer_loss, moved, backend=backend)[3][-64:], without_order[3], rtol=1e-4, atol=1e-5
    )
    for name, result, expected in zip(NAMES, results, wanted, strict=True):
        if name == "d_index_k":
            assert result[:-64].eq(0).all()
            result = result[-64:]
        assert result.equal(expected), name


def check(given: Arguments, backend: str, **options: bool) -> None:
    """The loss must be within float32's error of the reference, gradients within twice the error of plain bf16."""
    with harness.refusals_skip(backend):
        results = with_gradients(indexer_loss, given, backend=backend, **options)
    expected = with_gradients(indexer_loss, given, backend="reference", **options)
    options.pop("deterministic", None)
    baseline = with_gradients(oracles.indexer_loss, given, dtype=torch.bfloat16, **options)
    assert results[1] == expected[1]
    for name, result, wanted, plain in zip(NAMES, results, expected, baseline, strict=True):
        assert not result.isnan().any(), name
        if name == "loss":
            compare.assert_close(result, wanted, compare.INDEXER_LOSS, name)
        elif name != "num_rows":
            compare.assert_accurate(result, wanted, plain, name)
