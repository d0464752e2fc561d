"""``pack_seq`` and ``unpack_seq`` on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu.harness import DEVICE, bits, captured, no_compilation

import flashlatte

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("inner", [(128, 576), (3, 5)])
def test_the_references_bits_and_back(dtype: torch.dtype, inner: tuple[int, int]) -> None:
    lengths = torch.randint(0, 9, (33,), device=DEVICE)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    total = int(cu_seqlens[-1])
    x = torch.randint(0, 200, (total, *inner), device=DEVICE).to(dtype)
    packed = flashlatte.pack_seq(x, cu_seqlens, 8, pad_value=3, backend="portable")
    assert bits(packed).equal(bits(flashlatte.pack_seq(x, cu_seqlens, 8, pad_value=3, backend="reference")))
    assert bits(flashlatte.unpack_seq(packed, cu_seqlens, total, backend="portable")).equal(bits(x))


def test_lengths_change_under_a_graph() -> None:
    x = torch.randn(64, 16, 512, dtype=torch.bfloat16, device=DEVICE)
    cu_seqlens = torch.tensor([0, 10, 64], dtype=torch.int32, device=DEVICE)

    def call() -> torch.Tensor:
        packed = flashlatte.pack_seq(x, cu_seqlens, 60, backend="portable")
        return flashlatte.unpack_seq(packed, cu_seqlens, 64, backend="portable")

    replay, result = captured(call)
    with no_compilation():
        for boundary in (30, 60, 4):
            cu_seqlens[1] = boundary
            result.fill_(torch.nan)
            replay()
            kept = torch.arange(64, device=DEVICE)
            kept = (kept < boundary) | (kept - boundary < 60)
            assert result[kept].equal(x[kept])
