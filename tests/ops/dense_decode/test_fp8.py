"""``precision="fp8"``: its checks, and the reference against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashlatte import dense_decode
from flashlatte.kernels import fp8_attention
from flashlatte.runtime import dispatch, machine
from flashlatte.testing import oracles
from flashlatte.testing.cases import DenseDecodeCase

E4M3 = torch.float8_e4m3fn
CASE = DenseDecodeCase(3, 2, 700, 5, page_size=16, cache_dtype=E4M3, causal=True)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("sharpness", "bound", "lse_bound"), [(1, 0.05, 1e-3), (40, 0.05, 0.01), (150, 0.1, 0.2)])
def test_error_against_float64(sharpness: float, bound: float, lse_bound: float) -> None:
    """Equal, plain and peaked weights; the error of the exact form is 0.002 in each case."""
    inputs = CASE.inputs()
    inputs["q"] = inputs["q"] * sharpness
    out, lse = dense_decode(**inputs, precision="fp8", backend="reference")
    expected, expected_lse = oracles.dense_decode(**inputs)
    assert 0.005 < relative_error(out, expected) < bound
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=lse_bound, rtol=0)


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, head_dim=512, head_dim_v=512, zero_lengths=True, varlen=True),
        replace(CASE, s_k=1, batch=1),
        replace(CASE, h_q=4, h_kv=2, head_dim=48, head_dim_v=32, dtype=torch.float16),
    ],
    ids=str,
)
def test_arguments(case: DenseDecodeCase) -> None:
    inputs = case.inputs()
    results = dense_decode(**inputs, precision="fp8", backend="reference")
    for result, expected in zip(results, oracles.dense_decode(**inputs), strict=True):
        torch.testing.assert_close(result.double(), expected.double(), atol=0.03, rtol=0.05)


def test_e4m3_queries_over_one_key_are_exact() -> None:
    """Queries that are representable in e4m3 are not rounded, and neither are the values of a single key."""
    q = torch.arange(-288, 288).remainder(16).sub(8).bfloat16().expand(1, 1, 2, 576) * 0.25
    key = q[0, 0, :1].flip(-1).to(E4M3).expand(8, 1, 576)[None]
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    arguments = {"softmax_scale": 0.01, "k_scale": 2.0, "backend": "reference"}
    exact = dense_decode(q, key, table, length, **arguments)
    rounded = dense_decode(q, key, table, length, precision="fp8", **arguments)
    for result, expected in zip(rounded, exact, strict=True):
        assert torch.equal(result, expected)


def test_quantized_queries() -> None:
    """The relative error of a row does not depend on its magnitude, and that of the rope is much smaller."""
    q = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    rounded = fp8_attention.quantize_queries(q, 512)
    assert 0.02 < relative_error(rounded[:, :512], q[:, :512]) < 0.03
    assert relative_error(rounded[:, 512:], q[:, 512:]) < 0.001
    for size in (2.0**-60, 2.0**60):
        assert torch.equal(fp8_attention.quantize_queries(q * size, 512), rounded * size)
    assert torch.equal(fp8_attention.quantize_queries(torch.zeros(1, 576), 512), torch.zeros(1, 576))
    q[3, 5], q[4, 520] = torch.nan, torch.inf
    assert torch.equal(fp8_attention.quantize_queries(q, 512).isnan().any(-1).nonzero()[:, 0], torch.tensor([3, 4]))


def test_a_nan_of_the_cache_is_seen() -> None:
    inputs = replace(CASE, causal=False).inputs()
    page, token = int(inputs["block_table"][1, 0]), 3
    inputs["k_cache"].view(torch.uint8)[page, token, 0, 300] = 0x7F
    out, _ = dense_decode(**inputs, precision="fp8", backend="reference")
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("precision", ["bf16", 8, "FP8", False])
def test_other_precisions(precision: Any) -> None:
    with pytest.raises(ValueError, match=r"^precision must be None or 'fp8', got "):
        dense_decode(**CASE.inputs(), precision=precision)


def test_other_caches() -> None:
    inputs = replace(CASE, cache_dtype=None).inputs()
    with pytest.raises(ValueError, match=r"^precision must be None unless k_cache is float8_e4m3fn, got 'fp8' and k_"):
        dense_decode(**inputs, precision="fp8")


def test_portable_has_no_fp8() -> None:
    with pytest.raises(ValueError, match=r"it has no precision='fp8': it multiplies in q's dtype"):
        dense_decode(**CASE.inputs(), precision="fp8", backend="portable")


@pytest.mark.skipif(machine.interpreting(), reason="hopper does not run in the interpreter")
def test_hopper_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "compute_capability", lambda _: (9, 0))
    call = dispatch.CallSpec(
        "dense_decode", torch.device("cuda", 0), torch.bfloat16, cache_format="fp8", page_size=64, head_dim=576,
        head_dim_v=512, h_q=128, h_kv=1,
    )  # fmt: skip
    fp8_call = replace(call, optional_features="precision='fp8'")
    assert dispatch.select(fp8_call) == dispatch.select(call) == "hopper"
