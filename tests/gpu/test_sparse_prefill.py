"""Sparse prefill on a GPU: every backend compared with the reference, and guarantees such as reproducibility."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments, Results

import flashlatte
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparsePrefillCase
from flashlatte.testing.draws import Draw

pytestmark = pytest.mark.gpu

# Tokens of the latent and indices in FlashMLA's tests.
SCOPES = (
    (128, 128),
    (256, 256),
    (512, 512),
    (592, 128),
    (1840, 256),
    (1592, 384),
    (1521, 512),
    (95, 128),
    (153, 256),
    (114, 384),
)
FLASHMLA_GRID = harness.pairwise(
    {
        "head_dim": (576, 512),
        "h_q": (64, 128),
        "scope": SCOPES,
        "s_q": (1, 62, 213),
        "topk_lengths": (False, True),
        "attn_sink": (False, True),
        "empty_rows": (0.0, 0.2),
        "strided": (False, True),
    }
)
UNUSUAL_GRID = harness.pairwise(
    {
        "head_dim, d_v": ((576, 512), (512, 512), (192, 128), (48, 32), (80, 80)),
        "h_q": (1, 3, 8, 16, 96),
        "scope": ((1, 1), (40, 65), (700, 333), (3000, 1000)),
        "s_q": (1, 77),
        "dtype": (torch.bfloat16, torch.float16),
        "index_dtype": (torch.int32, torch.int64),
        "topk_lengths": (False, True),
        "duplicates": (False, True),
        "strided": (False, True),
    }
)
LARGER = (
    SparsePrefillCase(s_q=4096, s_kv=2048, h_q=128, topk=2048),
    SparsePrefillCase(s_q=1234, s_kv=4321, h_q=128, topk=4096, topk_lengths=True),
    SparsePrefillCase(s_q=300, s_kv=32, h_q=64, topk=2048, head_dim=512),
    SparsePrefillCase(s_q=300, s_kv=64, h_q=64, topk=8192, invalid_share=0.99),
)
ORACLE_CASES = (
    SparsePrefillCase(s_q=5, s_kv=900, h_q=64, topk=512, topk_lengths=True),
    SparsePrefillCase(s_q=5, s_kv=900, h_q=128, topk=256, head_dim=512),
)
ON_EVERY_BACKEND = pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
# Few heads, and tokens enough that several share a tile on Hopper.
GROUPED = (
    SparsePrefillCase(s_q=510, s_kv=3000, h_q=16, topk=512, topk_lengths=True, empty_rows=0.05),
    SparsePrefillCase(s_q=525, s_kv=40_000, h_q=12, topk=640, topk_lengths=True, strided=True),
    SparsePrefillCase(s_q=511, s_kv=3000, h_q=32, topk=512, head_dim=512, index_dtype=torch.int64),
    SparsePrefillCase(s_q=700, s_kv=1592, h_q=17, topk=640, topk_lengths=True, dtype=torch.float16),
    SparsePrefillCase(s_q=520, s_kv=700, h_q=16, topk=666, duplicates=True, topk_lengths=True),
)
TYPICAL = SparsePrefillCase(s_q=200, s_kv=3000, h_q=128, topk=1024, topk_lengths=True, empty_rows=0.05)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", FLASHMLA_GRID, ids=harness.ids(FLASHMLA_GRID))
def test_flashmla_grid(row: Arguments, backend: str) -> None:
    check(case_of(row).inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", UNUSUAL_GRID, ids=harness.ids(UNUSUAL_GRID))
def test_unusual_shapes(row: Arguments, backend: str) -> None:
    head_dim, d_v = row["head_dim, d_v"]
    rest = {name: value for name, value in row.items() if "," not in name}
    check(case_of(rest | {"head_dim": head_dim, "d_v": d_v}).inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_larger_cases(case: SparsePrefillCase, backend: str) -> None:
    check(case.inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("case", ORACLE_CASES, ids=str)
def test_error_against_float64(case: SparsePrefillCase, backend: str) -> None:
    arguments = case.inputs(DEVICE)
    oracle, _, _ = oracles.sparse_prefill(**arguments)
    baseline, _, _ = oracles.sparse_prefill(**arguments, dtype=torch.bfloat16)
    compare.assert_accurate(prefill(arguments, backend)["out"], oracle, baseline, "out")


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_tokens_that_share_a_tile(case: SparsePrefillCase) -> None:
    arguments = case.inputs(DEVICE)
    check(arguments, "hopper")
    # Then most tokens are selected by all.
    arguments["indices"][:, :, : case.topk * 3 // 4] = arguments["indices"][:1, :, : case.topk * 3 // 4]
    arguments["kv"].nan_to_num_(nan=0.1)
    check(arguments, "hopper")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [3, 300, 550])
def test_nan_affects_only_tokens_that_select_it(value: float, column: int) -> None:
    arguments = replace(GROUPED[0], topk_lengths=False, empty_rows=0.0).inputs(DEVICE)
    indices = arguments["indices"][:, 0]
    row = indices[205][(indices[205] >= 0) & (indices[205] < len(arguments["kv"]))][0]
    arguments["kv"][row, 0, column] = value
    others = ~(indices == row).any(dim=-1)
    results = prefill(arguments, "hopper", poisoned_outputs(arguments))
    kept = arguments | {name: arguments[name][others] for name in ("q", "indices")}
    assert not others[205]
    assert torch.isfinite(results["out"][others]).all()
    assert_right({name: result[others] for name, result in results.items()}, kept)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("case", [TYPICAL, GROUPED[0]], ids=str)
def test_same_bits_run_after_run(case: SparsePrefillCase, backend: str) -> None:
    arguments = case.inputs(DEVICE)
    first = prefill(arguments, backend)
    for _ in range(3):
        harness.assert_same_bits(first, prefill(arguments, backend))


@ON_EVERY_BACKEND
@pytest.mark.parametrize("case", [TYPICAL, GROUPED[0]], ids=str)
def test_graph_follows_indices_and_lengths(case: SparsePrefillCase, backend: str) -> None:
    arguments = case.inputs(DEVICE)
    indices, lengths = arguments["indices"].clone(), arguments["topk_length"].clone()
    arguments["indices"].fill_(-1)
    arguments["topk_length"].fill_(0)
    outputs = poisoned_outputs(arguments)
    replay, results = harness.captured(lambda: prefill(arguments, backend, outputs))

    for new_indices, new_lengths in ((indices, lengths), (indices, lengths // 2), (indices.flip(0), lengths.flip(0))):
        arguments["indices"].copy_(new_indices)
        arguments["topk_length"].copy_(new_lengths)
        harness.nan_outputs(**results)
        replay()
        assert_right(results, arguments)


@ON_EVERY_BACKEND
def test_more_queries_than_a_grid_axis_and_than_2_31_elements(backend: str) -> None:
    s_q, h_q, s_kv, topk = 70_000, 64, 4096, 128
    draw = Draw(0, DEVICE)
    arguments: Arguments = {
        "q": draw.normal(s_q, h_q, 576, dtype=torch.bfloat16),
        "kv": draw.normal(s_kv, 1, 576, dtype=torch.bfloat16),
        "indices": draw.integers(0, s_kv, s_q, 1, topk).int(),
    }
    assert arguments["q"].numel() > 2**31 < s_q * h_q * 512
    results = prefill(arguments, backend, poisoned_outputs(arguments))
    for name, result in results.items():
        assert torch.isfinite(result).all(), name
    some = torch.tensor([0, 1, 65_534, 65_535, 65_536, s_q - 2, s_q - 1], device=DEVICE)
    chosen = arguments | {name: arguments[name][some] for name in ("q", "indices")}
    assert_right({name: result[some] for name, result in results.items()}, chosen)


@ON_EVERY_BACKEND
def test_latent_beyond_2_31_elements(backend: str) -> None:
    draw = Draw(0, DEVICE)
    s_kv = 2**31 // 576 + 20_000
    kv = torch.full((s_kv, 1, 576), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    for part in (kv[:10_000], kv[-10_000:]):
        part.copy_(draw.normal(*part.shape, dtype=torch.bfloat16))
    low, high = draw.integers(0, 10_000, 50, 1, 256), draw.integers(s_kv - 10_000, s_kv, 50, 1, 256)
    arguments: Arguments = {
        "q": draw.normal(50, 128, 576, dtype=torch.bfloat16),
        "kv": kv,
        "indices": torch.cat([low, high], dim=-1).int(),
    }
    check(arguments, backend)


def test_out_may_lie_anywhere() -> None:
    """If TMA cannot store to ``out``, another implementation is selected."""
    arguments = TYPICAL.inputs(DEVICE)
    s_q, h_q, _ = arguments["q"].shape
    around = arguments["q"].new_full((s_q, h_q, 513), 7.0)
    out, max_logits, lse = flashlatte.sparse_prefill(**arguments, out=around[..., 1:])
    assert_right({"out": out, "max_logits": max_logits, "lse": lse}, arguments)
    assert (around[..., 0] == 7.0).all()


@ON_EVERY_BACKEND
def test_new_lengths_compile_nothing(backend: str) -> None:
    rng = random.Random(0)
    cases = [
        replace(TYPICAL, s_q=rng.randint(1, 400), s_kv=rng.randint(1, 4000), topk=128 * rng.randint(1, 9), seed=seed)
        for seed in range(20)
    ]
    for case in (replace(TYPICAL, s_q=1), replace(TYPICAL, s_q=400, topk=128)):
        prefill(case.inputs(DEVICE), backend)
    with harness.no_compilation():
        for case in cases:
            prefill(case.inputs(DEVICE), backend)


@ON_EVERY_BACKEND
def test_compiles_as_one_graph(backend: str) -> None:
    arguments = replace(TYPICAL, s_q=20).inputs(DEVICE)
    prefill(arguments, backend)

    def out_plus_statistics(q: torch.Tensor) -> torch.Tensor:
        out, max_logits, lse = flashlatte.sparse_prefill(**harness.replaced(arguments, q=q), backend=backend)
        return out.float() + (max_logits + lse).unsqueeze(-1)

    harness.assert_compiles(out_plus_statistics, arguments["q"])


def case_of(row: Arguments) -> SparsePrefillCase:
    fields = {name: value for name, value in row.items() if name != "scope"}
    fields["s_kv"], fields["topk"] = row["scope"]
    return SparsePrefillCase(**fields)


def prefill(arguments: Arguments, backend: str, outputs: Arguments | None = None) -> Results:
    with harness.refusals_skip(backend):
        out, max_logits, lse = flashlatte.sparse_prefill(**arguments, **(outputs or {}), backend=backend)
    return {"out": out, "max_logits": max_logits, "lse": lse}


def poisoned_outputs(arguments: Arguments) -> Arguments:
    s_q, h_q, _ = arguments["q"].shape
    return harness.nan_outputs(out=arguments["q"].new_empty(s_q, h_q, arguments.get("d_v", 512)))


def assert_right(results: Results, arguments: Arguments) -> None:
    out, max_logits, lse = flashlatte.sparse_prefill(**arguments, backend="reference")
    compare.assert_close(results["out"], out, compare.SPARSE_PREFILL_OUT, "out")
    compare.assert_close(results["max_logits"], max_logits, compare.SPARSE_PREFILL_LSE, "max_logits")
    compare.assert_close(results["lse"], lse, compare.SPARSE_PREFILL_LSE, "lse")


def check(arguments: Arguments, backend: str) -> None:
    assert_right(prefill(arguments, backend, poisoned_outputs(arguments)), arguments)
