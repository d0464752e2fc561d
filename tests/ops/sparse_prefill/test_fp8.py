"""``precision="fp8"``: its checks, and the reference against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashlatte import sparse_prefill
from flashlatte.kernels import fp8_attention
from flashlatte.runtime import dispatch, machine
from flashlatte.testing import oracles
from flashlatte.testing.cases import SparsePrefillCase

E4M3 = torch.float8_e4m3fn
CASE = SparsePrefillCase(4, 900, 5, 512, topk_lengths=True, empty_rows=0.2)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("sharpness", "bound", "logit_bound"), [(0.1, 0.05, 0.003), (1, 0.06, 0.03), (20, 0.15, 0.3)])
def test_error_against_float64(sharpness: float, bound: float, logit_bound: float) -> None:
    """Equal, plain and peaked weights; the error of the exact form is 0.002 in each case."""
    inputs = replace(CASE, softmax_scale=1.0).inputs()
    inputs["kv"] = inputs["kv"] + 0.05  # values without a mean
    inputs["q"] = inputs["q"] * sharpness
    out, max_logits, lse = sparse_prefill(**inputs, precision="fp8", backend="reference")
    expected, expected_max, expected_lse = oracles.sparse_prefill(**inputs)
    assert 0.01 < relative_error(out, expected) < bound
    for result, exact in ((lse, expected_lse), (max_logits, expected_max)):
        torch.testing.assert_close(result.double(), exact.double(), atol=logit_bound, rtol=0)


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, head_dim=512, d_v=512, duplicates=True, attn_sink=False),
        replace(CASE, head_dim=48, d_v=32, dtype=torch.float16, strided=True),
    ],
    ids=str,
)
def test_arguments(case: SparsePrefillCase) -> None:
    inputs = case.inputs()
    results = sparse_prefill(**inputs, precision="fp8", backend="reference")
    for result, expected in zip(results, oracles.sparse_prefill(**inputs), strict=True):
        torch.testing.assert_close(result.double(), expected.double(), atol=0.03, rtol=0.05)


def test_quantized_keys() -> None:
    """The scale is a power of two, and follows the largest finite value."""
    kv = torch.randn(64, 1, 576, generator=torch.Generator().manual_seed(0))
    rounded = fp8_attention.quantize_keys(kv)
    assert 0.02 < relative_error(rounded, kv) < 0.03
    for size in (2.0**-60, 2.0**60):
        assert torch.equal(fp8_attention.quantize_keys(kv * size), rounded * size)
    assert torch.equal(fp8_attention.quantize_keys(kv.to(E4M3).bfloat16()), kv.to(E4M3).float())
    assert torch.equal(fp8_attention.quantize_keys(torch.zeros(2, 1, 8)), torch.zeros(2, 1, 8))
    spoiled = kv.clone()
    spoiled[3, 0, 5], spoiled[4, 0, 6] = torch.nan, torch.inf
    others = torch.ones_like(kv, dtype=torch.bool)
    others[3, 0, 5] = others[4, 0, 6] = False
    result = fp8_attention.quantize_keys(spoiled)
    assert torch.equal(result[others], rounded[others])
    assert result[3, 0, 5].isnan()
    assert result[4, 0, 6] > rounded.max() / 2


@pytest.mark.parametrize("precision", ["bf16", 8, "FP8", False])
def test_other_precisions(precision: Any) -> None:
    with pytest.raises(ValueError, match=r"^precision must be None or 'fp8', got "):
        sparse_prefill(**CASE.inputs(), precision=precision)


def test_portable_has_no_fp8() -> None:
    with pytest.raises(ValueError, match=r"it has no precision='fp8': it multiplies in q's dtype"):
        sparse_prefill(**CASE.inputs(), precision="fp8", backend="portable")


@pytest.mark.skipif(machine.interpreting(), reason="hopper does not run in the interpreter")
def test_hopper_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "compute_capability", lambda _: (9, 0))
    call = dispatch.CallSpec(
        "sparse_prefill", torch.device("cuda", 0), torch.bfloat16, head_dim=576, head_dim_v=512, h_q=128, h_kv=1
    )
    fp8_call = replace(call, optional_features="precision='fp8'")
    assert dispatch.select(fp8_call) == dispatch.select(call) == "hopper"
