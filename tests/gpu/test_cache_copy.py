"""Pages copied and swapped on a GPU, between GPU and pinned host memory, byte for byte."""

from __future__ import annotations

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE

from flashlatte import kv_cache

pytestmark = pytest.mark.gpu


def random_bytes(*shape: int, device: torch.device | str = DEVICE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=generator)
    return values if torch.device(device).type == "cuda" else values.cpu().pin_memory()


def random_pages(count: int, pages: int, seed: int) -> torch.Tensor:
    return torch.randperm(pages, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))[:count]


@pytest.mark.parametrize("width", [656, 584, 1152, 13])
@pytest.mark.parametrize("devices", [(DEVICE, "cpu"), ("cpu", DEVICE), (DEVICE, DEVICE)], ids=str)
@pytest.mark.parametrize("on_device", [False, True])
def test_swap(width: int, devices: tuple[torch.device | str, torch.device | str], on_device: bool) -> None:
    source = random_bytes(300, 64, width, device=devices[0])
    target = random_bytes(200, 64, width, device=devices[1], seed=1)
    src, dst = random_pages(150, 300, 2), random_pages(150, 200, 3)
    expected = target.cpu().clone()
    expected[dst.cpu()] = source.cpu()[src.cpu()]
    lists = (src, dst) if on_device else (src.tolist(), dst.tolist())
    kv_cache.swap_blocks(source, target, *lists, backend="portable")
    torch.cuda.synchronize()
    assert target.cpu().equal(expected)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_permutation_of_pages_of_more_bytes_than_scratch(on_device: bool) -> None:
    cache = random_bytes(4000, 64, 656)
    order = random_pages(4000, 4000, 1)
    every = torch.arange(4000, device=DEVICE)
    expected = cache[order]
    lists = (order, every) if on_device else (order.tolist(), every.tolist())
    kv_cache.copy_blocks(cache, *lists, backend="portable")
    assert cache.equal(expected)


def test_a_cache_beyond_2_31_bytes_and_pairs_that_do_not_exist() -> None:
    pages = 2**32 // (64 * 656) + 10
    cache = torch.zeros(pages, 64, 656, dtype=torch.uint8, device=DEVICE)
    cache[-1] = random_bytes(64, 656)
    src = torch.tensor([pages - 1, pages, -1, 2**31 - 1, 3], dtype=torch.int32, device=DEVICE)
    dst = torch.tensor([pages - 2, 1, 2, 3, -(2**31)], dtype=torch.int32, device=DEVICE)
    kv_cache.copy_blocks(cache, src, dst, backend="portable")
    assert cache[-2].equal(cache[-1])
    assert not cache[:-2].any()


def test_a_graph_follows_its_lists() -> None:
    cache, host = random_bytes(50, 64, 656), random_bytes(40, 64, 656, device="cpu", seed=1)
    src, dst = random_pages(30, 50, 0), random_pages(30, 40, 1)
    replay, _ = harness.captured(lambda: kv_cache.swap_blocks(cache, host, src, dst, backend="portable"))
    for seed in range(3):
        src.copy_(random_pages(30, 50, 2 + seed))
        dst.copy_(random_pages(30, 40, 9 + seed))
        host.zero_()
        replay()
        torch.cuda.synchronize()
        assert host[dst.cpu()].equal(cache[src].cpu())


def test_new_numbers_of_pages_compile_nothing() -> None:
    cache = random_bytes(100, 64, 656)
    for on_device in (False, True):
        lists = (random_pages(3, 50, 0), random_pages(3, 50, 1) + 50)
        kv_cache.copy_blocks(cache, *(lists if on_device else [one.tolist() for one in lists]), backend="portable")
    with harness.no_compilation():
        for count in (1, 2, 16, 33):
            kv_cache.copy_blocks(cache, random_pages(count, 50, 0), random_pages(count, 50, 1) + 50)
