"""``concat_mla_q`` on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu.harness import DEVICE, bits

import flashlatte

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 77, 40000])
@pytest.mark.parametrize("widths", [(512, 64), (130, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads_first", [False, True])
def test_bytes(tokens: int, widths: tuple[int, int], dtype: torch.dtype, heads_first: bool) -> None:
    """40,000 tokens of 128 heads are more than 2^31 elements."""
    shape = (128, tokens) if heads_first else (tokens, 128)
    parts = [torch.randn(*shape, width, dtype=torch.bfloat16, device=DEVICE).to(dtype) for width in widths]
    parts = [part.transpose(0, 1) if heads_first else part for part in parts]
    out = flashlatte.concat_mla_q(parts[0], parts[1], backend="portable")
    # In chunks of tokens: two copies of everything do not fit a GPU that is shared by tests.
    for joined, *of_parts in zip(*(x.split(4096) for x in (out, *parts)), strict=True):
        assert bits(joined[..., : widths[0]]).equal(bits(of_parts[0]))
        assert bits(joined[..., widths[0] :]).equal(bits(of_parts[1]))
