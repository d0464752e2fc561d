"""Dequantization on a GPU of every byte value at every position of a row."""

from __future__ import annotations

import pytest
import torch
from gpu.harness import DEVICE, KERNEL_BACKENDS, refusals_skip
from support.dequantize import POWERS, SCALES, decoded_tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
@pytest.mark.parametrize("form", ["v32", "model1"])
def test_scales_that_are_powers_of_two_are_exact(form: str, backend: str, heads: int) -> None:
    with refusals_skip(backend):
        got, expected = decoded_tokens(form, POWERS[form], heads, backend, DEVICE)
    assert torch.equal(got, expected.bfloat16())


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_other_scales_cost_two_roundings(backend: str) -> None:
    with refusals_skip(backend):
        got, expected = decoded_tokens("v32", SCALES, 128, backend, DEVICE)
    assert ((got.float() - expected).abs() <= 2**-7 * expected.abs()).all()
