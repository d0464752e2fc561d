"""``precision="fp8"`` of ``flash_mla_with_kvcache``, with queries in 16 bits and in e4m3."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.flash_mla_calls import assert_same, decode

from flashlatte import dense_decode
from flashlatte.testing import oracles
from flashlatte.testing.cases import DenseDecodeCase, SparseDecodeCase

E4M3 = torch.float8_e4m3fn
CASE = DenseDecodeCase(3, 2, 200, 4, cache_dtype=E4M3, causal=True, varlen=True, zero_lengths=True)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def test_queries_in_16_bits() -> None:
    inputs: dict[str, Any] = CASE.inputs() | {"k_scale": 0.02}
    expected = dense_decode(**inputs, precision="fp8", empty_lse=math.inf)
    del inputs["k_scale"]
    assert_same(decode(inputs, descale_k=0.02, precision="fp8"), expected)
    assert not torch.equal(decode(inputs, descale_k=0.02)[0], expected[0])


@pytest.mark.parametrize("descale_q", [None, 3.7, torch.tensor([3.7])], ids=["none", "number", "tensor"])
@pytest.mark.parametrize("descale_k", [None, 0.3, torch.tensor([0.3])], ids=["none", "number", "tensor"])
def test_queries_in_e4m3_are_not_rounded_again(descale_q: Any, descale_k: Any) -> None:
    """The only error is then that of rounded probabilities."""
    inputs = CASE.inputs()
    q = (inputs["q"] * 8).to(E4M3)
    scaled = q.double() * (1.0 if descale_q is None else 3.7)
    k_scale = 1.0 if descale_k is None else 0.3
    expected, expected_lse = oracles.dense_decode(**inputs | {"q": scaled, "k_scale": k_scale}, empty_lse=math.inf)
    out, lse = decode(inputs, q=q, descale_q=descale_q, descale_k=descale_k, precision="fp8")
    assert 0.005 < relative_error(out, expected) < 0.025
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=2e-4, rtol=1e-5)
    if descale_q is not None:
        twice = dense_decode(**inputs | {"q": scaled.bfloat16(), "k_scale": k_scale}, precision="fp8")[0]
        assert relative_error(twice, expected) > 1.5 * relative_error(out, expected)


def test_given_outputs_are_returned() -> None:
    inputs = CASE.inputs()
    out, lse = torch.empty(3, 2, 4, 512, dtype=torch.bfloat16), torch.empty(3, 4, 2)
    results = decode(inputs, q=inputs["q"].to(E4M3), descale_q=0.3, precision="fp8", out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (CASE, {"precision": "e4m3"}, "^precision must be None or 'fp8', got 'e4m3'$"),
        (DenseDecodeCase(1, 1, 8, 2), {"precision": "fp8"}, "^precision must be None unless k_cache is float8_e4m3fn"),
        (
            DenseDecodeCase(1, 1, 8, 2),
            {"precision": "fp8", "q": torch.zeros(1, 1, 2, 576).to(E4M3)},
            "^precision must be None unless k_cache is float8_e4m3fn",
        ),
        (
            CASE,
            {"precision": "fp8", "q": torch.zeros(3, 2, 4, 576).to(E4M3), "descale_q": torch.ones(2)},
            r"^descale_q must have one element, got shape \[2\]$",
        ),
        (SparseDecodeCase(1, 1, 40, 8, 4), {"precision": "fp8"}, "^precision belongs to dense decode over an fp8"),
    ],
)
def test_unsupported_arguments_are_refused(case: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(case.inputs(), **change)
