"""``reshape_and_cache`` on a GPU: bytes and scales are those of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments

import flashlatte
from flashlatte.testing.draws import Draw

pytestmark = pytest.mark.gpu

BACKEND = "portable"
QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
GRID = harness.pairwise(
    {
        "tokens": (1, 7, 700),
        "heads": (1, 3, 8),
        "widths": ((128, 128), (192, 128), (80, 80), (256, 5)),
        "page_size": (16, 64, 5),
        "layout": ("tokens first", "heads first", "apart"),
        "cache_dtype": (None, *QUANTIZED),
        "scale": ("number", "head", "token"),
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
    }
)


@pytest.mark.parametrize("row", GRID, ids=harness.ids(GRID))
def test_grid(row: Arguments) -> None:
    arguments = arguments_of(**row)
    expected = copied(arguments)
    flashlatte.reshape_and_cache(**arguments, backend=BACKEND)
    flashlatte.reshape_and_cache(**expected, backend="reference")
    assert_same(arguments, expected)


def test_a_cache_beyond_2_31_numbers() -> None:
    arguments = arguments_of(tokens=2, widths=(128, 128), page_size=64, heads=8, pages=2**31 // (64 * 8 * 128) + 9)
    last = arguments["k_cache"].shape[0] * 64 - 1
    arguments["slot_mapping"] = torch.tensor([last, 2**40], device=DEVICE)
    flashlatte.reshape_and_cache(**arguments, backend=BACKEND)
    assert arguments["k_cache"][-1, -1].equal(arguments["key"][0])
    assert arguments["v_cache"][-1, -1].equal(arguments["value"][0])
    assert not arguments["k_cache"][-1, :-1].any()


def test_a_graph_follows_its_slots() -> None:
    arguments = arguments_of(tokens=30, cache_dtype=torch.int8, scale="token")
    replay, _ = harness.captured(lambda: flashlatte.reshape_and_cache(**arguments, backend=BACKEND))
    for seed in range(3):
        slots = torch.randperm(40 * 16, generator=torch.Generator().manual_seed(seed))[:30] - 5
        arguments["slot_mapping"].copy_(slots)
        expected = copied(arguments)
        replay()
        flashlatte.reshape_and_cache(**expected, backend="reference")
        assert_same(arguments, expected)


def arguments_of(
    *,
    tokens: int,
    heads: int = 2,
    widths: tuple[int, int] = (128, 128),
    page_size: int = 16,
    layout: str = "tokens first",
    cache_dtype: torch.dtype | None = None,
    scale: str = "number",
    dtype: torch.dtype = torch.bfloat16,
    pages: int = 40,
) -> dict[str, Any]:
    draw = Draw(0, DEVICE)
    pages = max(pages, -(-tokens // page_size))
    order = {"tokens first": (0, 1, 2, 3), "heads first": (0, 2, 1, 3), "apart": (0, 3, 1, 2)}[layout]
    arguments: dict[str, Any] = {}
    for name, rows, width in (("k", "key", widths[0]), ("v", "value", widths[1])):
        sizes = {"tokens first": (page_size, heads, width), "heads first": (heads, page_size, width)}
        shape = sizes.get(layout, (heads, width, page_size))
        cache = torch.zeros(pages, *shape, dtype=cache_dtype or dtype, device=DEVICE)
        arguments[rows] = draw.normal(tokens + 3, heads, width, dtype=dtype, factor=20.0)
        arguments[rows][tokens:] = torch.nan
        arguments[f"{name}_cache"] = cache.permute(order)
        if cache_dtype is not None:
            by_head = draw.uniform(heads) + 0.1
            by_token = torch.full((pages, page_size, heads), -1.0, device=DEVICE)
            arguments[f"{name}_scale"] = {"number": 0.3, "head": by_head, "token": by_token}[scale]
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(0))[:tokens]
    slots[: tokens // 3] = -1
    arguments["slot_mapping"] = slots.to(DEVICE)
    return arguments


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE).copy_(value)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and name not in ("key", "value"):
            assert harness.bits(actual[name]).equal(harness.bits(value)), name
