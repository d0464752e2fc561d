"""``gather_records`` on a GPU: the kernel's bytes are those of the reference."""

from __future__ import annotations

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE

from flashlatte import kv_cache

pytestmark = pytest.mark.gpu

BACKEND = "portable"


@pytest.mark.parametrize("cache_format", kv_cache.FORMAT_NAMES)
@pytest.mark.parametrize("page_size", [64, 5])
def test_bytes(cache_format: str, page_size: int) -> None:
    layout = kv_cache.get_format(cache_format)
    cache = kv_cache.allocate(layout, 300, page_size, device=DEVICE)
    bits = torch.randint(0, 256, (300, page_size, layout.bytes_per_token), dtype=torch.uint8, device=DEVICE)
    cache.copy_(bits.view(layout.record_dtype).unsqueeze(2))
    lengths = torch.tensor([0, 1, 700, 64, 333], device=DEVICE)
    table = torch.randint(-3, 303, (5, 160), dtype=torch.int32, device=DEVICE)
    boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    starts = torch.tensor([0, 5, 64, 10000, 1], dtype=torch.int32, device=DEVICE)
    outs = []
    for backend in (BACKEND, "reference"):
        out = torch.full((1200, layout.record_width), 7, device=DEVICE).to(cache.dtype)
        given = {"cache_format": layout, "seq_starts": starts, "out": out, "backend": backend}
        outs.append(kv_cache.gather_records(cache, table, boundaries, 1200, **given))
    assert harness.bits(outs[0]).equal(harness.bits(outs[1]))


def test_a_cache_beyond_2_31_bytes() -> None:
    pages = 2**32 // (64 * 656) + 5
    cache = torch.zeros(pages, 64, 1, 656, dtype=torch.uint8, device=DEVICE)
    cache[-1] = 9
    table = torch.tensor([[pages - 1]], dtype=torch.int32, device=DEVICE)
    boundaries = torch.tensor([0, 64], dtype=torch.int32, device=DEVICE)
    assert kv_cache.gather_records(cache, table, boundaries, 64, backend=BACKEND).eq(9).all()
