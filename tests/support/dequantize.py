"""Caches whose tokens have every byte value at every position, and decode calls that return the tokens."""

from __future__ import annotations

import torch

import flashlatte
from flashlatte import kv_cache

TOKENS = PAGE = 256
# Scales of a token's tiles in turn; model1's are E8M0 bytes.
POWERS = {"v32": (2.0**-13, 1.0, 2.0**40, 2.0**-60), "model1": (2.0**-20, 1.0, 2.0**30, 2.0**-3)}
SCALES = (0.37, 1.0 / 3, 300.7, 1e-5)


def decoded_tokens(
    form: str, scales: tuple[float, ...], heads: int, backend: str | None, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of queries that select one token each, bf16 [TOKENS, latent], and the expected values, float32.

    The probability of the only token is 1, so the result is the token's value, rounded to bf16.
    """
    layout = kv_cache.get_format(form)
    latent, tile = layout.latent_dim, {"v32": 128, "model1": 64}[form]
    numbers = (torch.arange(TOKENS)[:, None] + torch.arange(latent)).remainder(256).to(torch.uint8)
    numbers[numbers & 0x7F == 0x7F] = 0  # NaN
    turns = [scales[place % len(scales)] for place in range(latent // tile)]
    expected = numbers.view(torch.float8_e4m3fn).float() * torch.tensor(turns).repeat_interleave(tile)

    cache = kv_cache.allocate(form, 1, PAGE)
    page = cache.view(-1)
    if form == "v32":
        rows = page.view(TOKENS, 656)
        rows[:, :latent] = numbers
        rows[:, 512:528] = torch.tensor(turns).view(torch.uint8)
    else:
        page[: TOKENS * 576].view(TOKENS, 576)[:, :latent] = numbers
        exponents = torch.tensor(turns).log2().to(torch.int32) + 127
        page[TOKENS * 576 : TOKENS * 584].view(TOKENS, 8)[:, :7] = exponents.to(torch.uint8)

    q = torch.zeros(TOKENS, 1, heads, layout.head_dim, dtype=torch.bfloat16, device=device)
    indices = torch.arange(TOKENS, dtype=torch.int32, device=device).view(TOKENS, 1, 1)
    out, _ = flashlatte.sparse_decode(q, cache.to(device), indices, cache_format=form, backend=backend)
    assert torch.equal(out, out[:, :, :1].expand_as(out))
    return out[:, 0, 0, :latent].cpu(), expected
