"""``rope_cache_write`` on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu.harness import DEVICE, bits, captured

from flashlatte import kv_cache

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_references_bits(name: str, interleaved: bool, dtype: torch.dtype) -> None:
    tokens, heads = 300, 128
    latent = torch.randn(tokens, 512, device=DEVICE).to(dtype)
    k_rope, q = torch.randn(tokens, 64, device=DEVICE).to(dtype), torch.randn(tokens, heads, 192, device=DEVICE)
    angles = torch.randn(4096, 32, device=DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 4096, (tokens,), device=DEVICE)
    slots = torch.randperm(512, device=DEVICE)[:tokens]
    slots[5], slots[77] = -1, 2**40
    results = []
    for backend in ("portable", "reference"):
        cache = kv_cache.allocate(name, 8, 64, device=DEVICE)
        keys, queries = k_rope.clone(), q.to(dtype).clone()
        kv_cache.rope_write(
            cache,
            slots,
            latent,
            keys,
            positions,
            cos_sin,
            interleaved=interleaved,
            q_rope=queries[..., 128:],
            scale=torch.full((1,), 0.02, device=DEVICE) if name == "fp8" else None,
            backend=backend,
        )
        results.append([bits(x) for x in (cache, keys, queries)])
    for ours, expected in zip(*results, strict=True):
        assert ours.equal(expected)


def test_slots_and_positions_change_under_a_graph() -> None:
    cache = kv_cache.allocate("bf16", 2, 64, device=DEVICE)
    latent = torch.randn(3, 512, dtype=torch.bfloat16, device=DEVICE)
    k_rope, cos_sin = torch.ones(3, 64, dtype=torch.bfloat16, device=DEVICE), torch.zeros(9, 64, device=DEVICE)
    cos_sin[:, :32] = torch.arange(9, device=DEVICE).unsqueeze(1)
    slots, positions = torch.tensor([0, 1, 2], device=DEVICE), torch.tensor([1, 1, 1], device=DEVICE)
    replay, _ = captured(
        lambda: kv_cache.rope_write(cache, slots, latent, k_rope, positions, cos_sin, interleaved=True)
    )
    slots.copy_(torch.tensor([70, -1, 71]))
    positions.copy_(torch.tensor([2, 3, 4]))
    k_rope.fill_(1.0)
    replay()
    assert cache[1, 6, 0, 512:].eq(2).all()
    assert cache[1, 7, 0, 512:].eq(4).all()
    assert cache[1, 6:8, 0, :512].equal(latent[[0, 2]])
