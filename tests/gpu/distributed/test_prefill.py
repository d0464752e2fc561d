"""One prompt over several GPUs, at DeepSeek-V3's sizes, compared with dense_prefill on one GPU."""

from __future__ import annotations

import pytest
import torch

from flashlatte import dense_prefill
from flashlatte.distributed import PrefillRing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("group")]

HEADS, LATENT, NOPE, ROPE, V = 16, 512, 128, 64, 128


@pytest.mark.parametrize("tokens", [1, 100, 4099])
def test_one_prompt(tokens):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    q, rows = draw(tokens, HEADS, NOPE + ROPE).bfloat16(), draw(tokens, LATENT + ROPE).bfloat16()
    up = (draw(LATENT, HEADS * (NOPE + V)) / LATENT**0.5).bfloat16()

    def expand(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (rows[:, :LATENT] @ up).unflatten(-1, (HEADS, NOPE + V)).split((NOPE, V), dim=-1)
        return torch.cat([keys, rows[:, None, LATENT:].expand(-1, HEADS, -1)], dim=-1), values

    ring = PrefillRing()
    here, cache = ring.positions(tokens, device="cuda"), torch.full_like(rows, torch.nan)
    results = [
        ring.attend(q[here], rows[here], expand, tokens=tokens, store=lambda held, at: cache.index_copy_(0, at, held))
        for _ in range(2)
    ]
    assert cache.equal(rows)
    (out, lse), again = results
    assert out.equal(again[0])
    assert lse.equal(again[1])

    keys, values = expand(rows)
    ends = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    wide = q.float(), keys.float(), values.float()
    want_out, want_lse = dense_prefill(*wide, ends, ends, tokens, tokens, causal=True, backend="reference")
    if len(here) == 0:
        assert out.shape == (0, HEADS, V)
        return
    # Probabilities, partial outputs and the result are each rounded to bf16, with errors of up to 2^-9.
    assert (out - want_out[here]).abs().max() <= 3 * 2**-9 * values.abs().amax()
    torch.testing.assert_close(lse, want_lse[here], rtol=1e-4, atol=1e-3)
