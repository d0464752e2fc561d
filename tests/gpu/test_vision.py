"""``vit_attention`` on a GPU, at head dims that are not powers of two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE

import flashlatte
from flashlatte.testing import compare
from flashlatte.testing.cases import DensePrefillCase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_every_image(head_dim: int) -> None:
    lengths = [1, 64, 300, 0, 1024]
    total, heads = sum(lengths), 4
    packed = torch.randn(1, total, 3, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = packed.unbind(2)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    longest = torch.tensor(max(lengths), device=DEVICE)
    result = flashlatte.vit_attention(q, k, v, cu_seqlens, longest)
    begin = 0
    for length in lengths:
        part = [x[:, begin : begin + length].transpose(1, 2).double() for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(part[0], part[1], part[2]).transpose(1, 2)
        torch.testing.assert_close(result[:, begin : begin + length].double(), expected, atol=1e-2, rtol=2**-7)
        begin += length


@pytest.mark.parametrize(
    "case",
    [
        DensePrefillCase(4, 300, 400, 6, 2, 64, 64, causal=True, varlen=True),
        DensePrefillCase(4, 400, 300, 4, 4, 72, 72, varlen=True, strided=True, zero_lengths=True),
        DensePrefillCase(4, 300, 400, 4, 1, 80, 80, window=(100, 30), varlen=True, dtype=torch.float16),
        DensePrefillCase(4, 300, 400, 6, 2, 96, 96, causal=True, varlen=True, strided=True, zero_lengths=True),
        DensePrefillCase(4, 300, 400, 6, 2, 104, 88, varlen=True, strided=True),
        DensePrefillCase(4, 300, 400, 4, 2, 192, 192, causal=True, varlen=True, strided=True),
        DensePrefillCase(4, 300, 400, 4, 2, 256, 256, causal=True, varlen=True, zero_lengths=True),
        DensePrefillCase(4, 300, 400, 4, 2, 256, 128, window=(70, 0), varlen=True, strided=True),
    ],
    ids=lambda case: f"{case.head_dim}-{case.d_v}",
)
def test_the_hopper_forward_at_any_head_dim(case: DensePrefillCase) -> None:
    """With NaN around the rows, before the first request and after the last one; forward only."""
    arguments = replace(case, unowned=70).inputs(DEVICE)
    shape = (*arguments["q"].shape[:2], case.d_v)
    out = torch.full(shape, torch.nan, dtype=case.dtype, device=DEVICE)
    with harness.refusals_skip("hopper"):
        _, lse = flashlatte.dense_prefill(**arguments, out=out, backend="hopper")
    wide = arguments | {name: arguments[name].float() for name in ("q", "k", "v")}
    expected, expected_lse = flashlatte.dense_prefill(**wide, backend="reference")
    compare.assert_close(out, expected, compare.DENSE_PREFILL_OUT, "out")
    compare.assert_close(lse, expected_lse, compare.DENSE_PREFILL_LSE, "lse")
    again, _ = flashlatte.dense_prefill(**arguments, backend="hopper")
    harness.assert_same_bits({"out": out}, {"out": again})
