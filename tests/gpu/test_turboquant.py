"""TurboQuant's kernels on a GPU: compared with references, in CUDA graphs, repeated, and in caches beyond 2^31
bytes.
"""

from __future__ import annotations

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments
from support.turboquant_oracle import key_margin

import flashlatte
from flashlatte.kv_cache import turboquant
from flashlatte.kv_cache.turboquant import TurboQuantFormat

pytestmark = pytest.mark.gpu

BACKEND = "portable"
NAMES = turboquant.TURBOQUANT_NAMES
DECODES = harness.pairwise(
    {
        "name": NAMES,
        "head_dim": (32, 64, 128),
        "heads": ((32, 8), (8, 8), (40, 1)),
        "gap": (0, 2, "allocated"),
        "page_size": (16, 64, 5),
        "lengths": ((1000, 0, 37), (5, 3000), (1,) * 70),
        "s_q": (1, 3),
        "causal": (False, True),
        "dtype": (torch.bfloat16, torch.float16),
        "index_dtype": (torch.int32, torch.int64),
    }
)
WRITES = harness.pairwise(
    {
        "name": NAMES,
        "head_dim": (32, 64, 128),
        "h_kv": (1, 3, 8),
        "gap": (0, 1, "allocated"),
        "page_size": (16, 5),
        "tokens": (1, 700),
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
    }
)


def empty_cache(name: str, pages: int, page_size: int, h_kv: int, head_dim: int, gap: int | str) -> torch.Tensor:
    layout = turboquant.turboquant_format(name, head_dim)
    width = layout.record_bytes + (gap if isinstance(gap, int) else layout.allocated_bytes - layout.record_bytes)
    storage = torch.randint(0, 256, (pages, page_size, h_kv, width), dtype=torch.uint8, device=DEVICE)
    return storage[..., : layout.record_bytes]


def decode_arguments(
    name: str = "turboquant_4bit_nc",
    head_dim: int = 128,
    heads: tuple[int, int] = (32, 8),
    gap: int | str = "allocated",
    page_size: int = 64,
    lengths: tuple[int, ...] = (1000, 0, 37),
    s_q: int = 1,
    causal: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int32,
) -> Arguments:
    """Random bytes, including NaN, in slots without a key."""
    layout = turboquant.turboquant_format(name, head_dim)
    counts = [-(-length // page_size) for length in lengths]
    cache = empty_cache(name, sum(counts) + 2, page_size, heads[1], head_dim, gap)
    order = torch.randperm(cache.shape[0]).tolist()
    table = torch.randint(-2, cache.shape[0] + 9, (len(lengths), max(counts)), dtype=index_dtype)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for column in range(count):
            table[request, column] = page = order.pop()
            used = min(length - column * page_size, page_size)
            key, value = torch.randn(2, used, heads[1], head_dim, device=DEVICE)
            cache[page, :used] = layout.encode(key, value)
    q = torch.randn(len(lengths), s_q, heads[0], head_dim, device=DEVICE).to(dtype)
    return {
        "q": q,
        "cache": cache,
        "block_table": table.to(DEVICE),
        "cache_seqlens": torch.tensor(lengths, dtype=index_dtype, device=DEVICE),
        "causal": causal,
    }


def assert_close_to_reference(arguments: Arguments) -> None:
    out, lse = flashlatte.turboquant_decode(
        **arguments,
        **harness.poisoned_decode_outputs(arguments | {"head_dim_v": arguments["q"].shape[3]}),
        backend=BACKEND,
    )
    expected, expected_lse = flashlatte.turboquant_decode(**arguments, backend="reference")
    tolerance = 1e-2 * max(expected.abs().max().item(), 1e-3)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=4e-3)


@pytest.mark.parametrize("row", DECODES, ids=harness.ids(DECODES))
def test_decode(row: Arguments) -> None:
    assert_close_to_reference(decode_arguments(**row))


def test_decode_is_the_same_twice() -> None:
    arguments = decode_arguments(lengths=(5000, 300, 8000))
    runs: list[harness.Results] = []
    for _ in range(2):
        out, lse = flashlatte.turboquant_decode(**arguments, backend=BACKEND)
        runs.append({"out": out, "lse": lse})
    harness.assert_same_bits(*runs)


def test_a_graph_follows_its_lengths() -> None:
    arguments = decode_arguments(lengths=(5000, 300, 8000))
    replay, (out, _) = harness.captured(lambda: flashlatte.turboquant_decode(**arguments, backend=BACKEND))
    for lengths in ((1, 0, 77), (5000, 300, 20), (12, 299, 8000)):
        arguments["cache_seqlens"].copy_(torch.tensor(lengths))
        replay()
        expected, _ = flashlatte.turboquant_decode(**arguments, backend="reference")
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)


def assert_same_records(
    cache: torch.Tensor, expected: torch.Tensor, key: torch.Tensor, slots: torch.Tensor, layout: TurboQuantFormat
) -> None:
    """Values' bytes and e4m3 are the reference's. A kernel sums a key's squares and its rotation in another order.

    So a number within float32's rounding of a midpoint may have the code beside, and a norm the fp16 beside.
    """
    if not layout.rotates:
        assert cache.equal(expected)
        return
    codes, rest = layout.norm_offset, layout.value_offset
    assert cache[..., rest:].equal(expected[..., rest:])
    # Halves of one sign are in the order of their bits.
    norms = [x[..., codes].int() + 256 * x[..., codes + 1].int() for x in (cache, expected)]
    assert ((norms[0] - norms[1]).abs() <= 1).all()
    found, wanted = (turboquant.unpack_codes(x[..., :codes], layout.key_bits) for x in (cache, expected))
    assert ((found - wanted).abs() <= 1).all()
    tokens = {slot: token for token, slot in enumerate(slots.tolist())}
    for page, offset, head in (found != wanted).any(dim=-1).nonzero().tolist():
        row = key[tokens[page * cache.shape[1] + offset], head].double().tolist()
        assert key_margin(row, layout.key_bits) < 1e-5


@pytest.mark.parametrize("row", WRITES, ids=harness.ids(WRITES))
def test_store_and_gather(row: Arguments) -> None:
    tokens, page_size, h_kv, head_dim, dtype = (
        row[name] for name in ("tokens", "page_size", "h_kv", "head_dim", "dtype")
    )
    key, value = (torch.randn(tokens, h_kv, head_dim, device=DEVICE).to(dtype) for _ in range(2))
    pages = -(-tokens // page_size) + 2
    slots = torch.randperm(pages * page_size, device=DEVICE)[:tokens]
    slots[tokens // 2] = -1
    cache = empty_cache(row["name"], pages, page_size, h_kv, head_dim, row["gap"])
    expected = cache.clone()
    flashlatte.turboquant_store(key, value, cache, slots, backend=BACKEND)
    flashlatte.turboquant_store(key, value, expected, slots, backend="reference")
    assert_same_records(cache, expected, key, slots, turboquant.turboquant_format(row["name"], head_dim))

    table = torch.randperm(pages, device=DEVICE).int().reshape(1, -1)
    boundaries = torch.tensor([0, pages * page_size], device=DEVICE)
    flashlatte.turboquant_store(key, value, cache.zero_(), slots, backend="reference")
    arguments = (cache, table, boundaries, pages * page_size, head_dim)
    found = flashlatte.turboquant_gather(*arguments, backend=BACKEND)
    wanted = flashlatte.turboquant_gather(*arguments, backend="reference")
    for actual, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_a_cache_beyond_2_31_bytes() -> None:
    arguments = decode_arguments(lengths=(40,))
    pages = 2**31 // (64 * 8 * 136) + 9
    far = empty_cache("turboquant_4bit_nc", pages, 64, 8, 128, "allocated")
    near, page = arguments["cache"], int(arguments["block_table"][0, 0])
    far[-1] = near[page]
    expected, _ = flashlatte.turboquant_decode(**arguments, backend=BACKEND)
    arguments |= {"cache": far, "block_table": torch.full_like(arguments["block_table"], pages - 1)}
    out, _ = flashlatte.turboquant_decode(**arguments, backend=BACKEND)
    assert out.equal(expected)
    key, value = torch.randn(2, 1, 8, 128, device=DEVICE).bfloat16()
    flashlatte.turboquant_store(key, value, far, torch.tensor([pages * 64 - 1], device=DEVICE), backend=BACKEND)
    flashlatte.turboquant_store(key, value, near, torch.tensor([page * 64 + 63], device=DEVICE), backend=BACKEND)
    assert far[-1].equal(near[page])
