"""Patches that see all of their image on a GPU, at head dims that are no powers of two."""

from __future__ import annotations

import pytest
import torch
from gpu.harness import DEVICE

import flashlatte

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
