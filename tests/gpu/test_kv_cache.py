"""Cache writes and gathers on a GPU: the kernels' bytes are those of the reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments

from flashlatte import kv_cache
from flashlatte.testing.draws import Draw

pytestmark = pytest.mark.gpu

BACKEND = "portable"
FORMATS = ("v32", "v32_no_rope", "model1", "fp8", "bf16", "fp16", "fp32")
WRITE_GRID = harness.pairwise(
    {
        "cache_format": FORMATS,
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
        "tokens": (1, 37, 5000),
        "page_size": (1, 2, 61, 64),
        "index_dtype": (torch.int32, torch.int64),
        "rope_apart": (False, True),
        "padding": (0, 7),
        "strided": (False, True),
        "scale_rounding": ("power_of_two", "exact"),
    },
    lambda row: row["scale_rounding"] == "power_of_two" or row["cache_format"] != "model1",
)
GATHER_GRID = harness.pairwise(
    {
        "cache_format": FORMATS,
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
        "lengths": ((1,), (0, 5, 0, 64), (700, 1, 3000, 0)),
        "page_size": (1, 2, 61, 64),
        "index_dtype": (torch.int32, torch.int64),
        "seq_starts": (False, True),
        "spare_rows": (0, 9),
        "garbage_pages": (False, True),
    }
)


@pytest.mark.parametrize("row", WRITE_GRID, ids=harness.ids(WRITE_GRID))
def test_write(row: Arguments) -> None:
    cache, arguments = write_arguments(**row)
    expected = cache.clone()
    kv_cache.write(expected, **arguments, backend="reference")
    write(cache, arguments)
    assert_same_bytes(cache, expected)


@pytest.mark.parametrize("x_gap", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cache_format", kv_cache.FORMAT_NAMES)
def test_write_of_all_magnitudes(cache_format: str, dtype: torch.dtype, x_gap: int) -> None:
    """Rows that reach from float32's smallest number to its largest, compared with the reference on the CPU.

    Rows with infinities or NaN are compared by which of their values are finite: the bits of a NaN are not specified.
    """
    draw, layout = Draw(0, DEVICE), kv_cache.get_format(cache_format)
    tokens = 600
    exponents = torch.linspace(-150, 126, tokens, device=DEVICE).round()
    width = layout.head_dim + x_gap
    some = draw.normal(tokens, width, dtype=torch.float32, factor=1.0)
    large = some * 2.0 ** exponents.clamp_min(-75)[:, None] * 2.0 ** (exponents - exponents.clamp_min(-75))[:, None]
    # Blocks of one row that differ in magnitude, from e4m3's smallest scale to beyond its largest.
    spread = some * 2.0 ** draw.integers(-14, 14, tokens, width)
    special = some.clone()
    special[0, 3], special[1, 130], special[2, 300], special[3, -1 - x_gap] = torch.nan, torch.inf, -torch.inf, -0.0
    for rows in (some, large, spread, special):
        x = rows.to(dtype)[:, : layout.head_dim]
        slots = torch.arange(tokens, device=DEVICE)
        finite = x.isfinite().all(1)
        cache, expected = written(layout, x, torch.where(finite, slots, -1))
        assert_same_bytes(cache, expected)
        values = [kv_cache.read(one, slots.cpu(), cache_format=layout) for one in written(layout, x, slots)]
        assert torch.equal(*(value.isfinite() for value in values))


def written(layout: kv_cache.CacheFormat, x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches on the CPU, written by the tested backend and by the reference."""
    cache = kv_cache.allocate(layout, -(-len(x) // 61), 61, device=DEVICE)
    expected = cache.cpu()
    write(cache, {"slot_mapping": slots, "x": x, "cache_format": layout})
    kv_cache.write(expected, slots.cpu(), x.cpu(), cache_format=layout, backend="reference")
    return cache.cpu(), expected


@pytest.mark.parametrize("row", GATHER_GRID, ids=harness.ids(GATHER_GRID))
def test_gather(row: Arguments) -> None:
    arguments = gather_arguments(**row)
    assert_gathers_right(arguments)


@pytest.mark.parametrize("cache_format", ["v32", "model1"])
def test_nan_affects_only_its_tile(cache_format: str) -> None:
    cache, arguments = write_arguments(cache_format, tokens=9)
    arguments["slot_mapping"] = torch.arange(9, device=DEVICE)
    arguments["x"][3, 130] = torch.nan
    expected = cache.clone()
    kv_cache.write(expected, **arguments, backend="reference")
    write(cache, arguments)
    rows = kv_cache.read(cache, arguments["slot_mapping"], cache_format=cache_format)
    wanted = kv_cache.read(expected, arguments["slot_mapping"], cache_format=cache_format)
    assert torch.isnan(wanted[3]).any()
    torch.testing.assert_close(rows, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cache_format", ["v32", "model1", "bf16"])
def test_cache_beyond_2_31_elements(cache_format: str) -> None:
    layout = kv_cache.get_format(cache_format)
    page_size, draw = 64, Draw(0, DEVICE)
    num_pages = 2**31 // (page_size * layout.record_width) + 1000
    cache = kv_cache.allocate(layout, num_pages, page_size, device=DEVICE)
    slots = num_pages * page_size
    ends = [torch.arange(begin, begin + 3000, device=DEVICE) for begin in (0, slots // 2, slots - 3000)]
    slot_mapping = torch.cat(ends).int()
    rows = draw.normal(slot_mapping.numel(), layout.head_dim, dtype=torch.bfloat16)
    write(cache, {"slot_mapping": slot_mapping, "x": rows, "cache_format": layout})
    read_back = kv_cache.read(cache, slot_mapping, cache_format=layout, dtype=torch.float32)
    expected = kv_cache.dequantize(kv_cache.quantize(rows, layout), layout, dtype=torch.float32)
    assert torch.equal(read_back, expected)

    assert_gathers_right(
        {
            "cache": cache,
            "block_table": torch.tensor([[0, 1, num_pages - 2, num_pages - 1]], dtype=torch.int32, device=DEVICE),
            "cu_seqlens": torch.tensor([0, 4 * page_size], dtype=torch.int32, device=DEVICE),
            "cache_format": layout,
            "out": torch.full((4 * page_size, layout.head_dim), torch.nan, dtype=torch.bfloat16, device=DEVICE),
        }
    )


@pytest.mark.parametrize("cache_format", ["v32", "model1", "fp8"])
def test_graph_follows_slots_and_pages(cache_format: str) -> None:
    cache, arguments = write_arguments(cache_format, tokens=500, scale=scale_of(cache_format, on_device=True))
    gathering = gather_arguments(cache_format, lengths=(100, 60), scale=scale_of(cache_format, on_device=True))

    def write_and_gather() -> torch.Tensor:
        write(cache, arguments)
        return gather(gathering)

    replay, _ = harness.captured(write_and_gather)
    for shift in (0, 11, 300):
        arguments["slot_mapping"].copy_(arguments["slot_mapping"].roll(shift))
        arguments["x"].mul_(-1.25)
        gathering["block_table"].copy_(gathering["block_table"].roll(shift))
        gathering["cu_seqlens"][1] = 10 + shift % 50
        if gathering["scale"] is not None:
            gathering["scale"].mul_(1.5)
            arguments["scale"].mul_(1.5)
        gathering["out"].fill_(torch.nan)
        expected = cache.clone()
        kv_cache.write(expected, **arguments, backend="reference")
        replay()
        assert_same_bytes(cache, expected)
        assert_same_rows(gathering["out"], reference_rows(gathering))


def test_new_shapes_compile_nothing() -> None:
    rng = random.Random(0)

    def run(tokens: int, seed: int) -> None:
        for cache_format in ("v32", "model1"):
            cache, arguments = write_arguments(cache_format, tokens=tokens, seed=seed)
            write(cache, arguments)
            gather(gather_arguments(cache_format, lengths=(tokens, 1, 2 * tokens), seed=seed))

    run(1, 0)
    run(4096, 1)
    with harness.no_compilation():
        for seed in range(20):
            run(rng.randint(1, 3000), seed)


def test_compiles_as_one_graph() -> None:
    cache, arguments = write_arguments("v32", tokens=100)
    gathering = gather_arguments("v32", lengths=(70,))
    write(cache, arguments)

    def write_then_gather(x: torch.Tensor) -> torch.Tensor:
        kv_cache.write(cache, **harness.replaced(arguments, x=x), backend=BACKEND)
        rows = kv_cache.gather(**harness.replaced(gathering, cache=cache), backend=BACKEND)
        return torch.nan_to_num(rows) * 2

    harness.assert_compiles(write_then_gather, arguments["x"])


def write_arguments(
    cache_format: str,
    *,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    index_dtype: torch.dtype = torch.int32,
    rope_apart: bool = False,
    padding: int = 0,
    strided: bool = False,
    scale_rounding: str = "power_of_two",
    scale: Any = 0.02,
    seed: int = 0,
) -> tuple[torch.Tensor, Arguments]:
    """A filled cache, slots some of which are to be skipped, and rows some of which saturate."""
    draw, layout = Draw(seed, DEVICE), kv_cache.get_format(cache_format)
    cache = random_cache(draw, cache_format, -(-2 * tokens // page_size) + 1, page_size)
    slots = torch.randperm(cache.shape[0] * page_size, generator=draw.on_device, device=DEVICE)[:tokens]
    outside = draw.integers(0, 5, tokens) == 0
    slots[outside] = torch.where(draw.integers(0, 2, tokens) == 0, -1, cache.shape[0] * page_size)[outside]
    rows = draw.normal(tokens + padding, layout.head_dim + (8 if strided else 0), dtype=dtype)
    rows[::3] *= 40
    rows[tokens:] = torch.nan
    x = rows[:, : layout.head_dim]
    arguments: Arguments = {
        "slot_mapping": slots.to(index_dtype),
        "x": x[:, : layout.latent_dim] if rope_apart else x,
        "rope": x[:, layout.latent_dim :] if rope_apart else None,
        "cache_format": layout,
        "scale_rounding": scale_rounding,
        "scale": scale if layout.takes_scale else None,
    }
    return cache, arguments


def gather_arguments(
    cache_format: str,
    *,
    lengths: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    index_dtype: torch.dtype = torch.int32,
    seq_starts: bool = False,
    spare_rows: int = 0,
    garbage_pages: bool = False,
    scale: Any = 0.02,
    seed: int = 0,
) -> Arguments:
    draw, layout = Draw(seed, DEVICE), kv_cache.get_format(cache_format)
    starts = [7 * request for request in range(len(lengths))]
    columns = max(-(-(start + length) // page_size) for start, length in zip(starts, lengths, strict=True))
    num_pages = len(lengths) * columns
    order = torch.randperm(num_pages, generator=draw.on_device, device=DEVICE)
    table = order.view(len(lengths), columns).to(index_dtype)
    if garbage_pages:
        table[0, -1], table[-1, 0] = -1, 2**31 - 1
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    rows = sum(lengths) + spare_rows
    return {
        "cache": random_cache(draw, cache_format, num_pages, page_size),
        "block_table": table,
        "cu_seqlens": cu_seqlens.to(index_dtype),
        "seq_starts": torch.tensor(starts, dtype=index_dtype, device=DEVICE) if seq_starts else None,
        "cache_format": layout,
        "scale": scale if layout.takes_scale else None,
        "out": torch.full((rows, layout.head_dim), torch.nan, dtype=dtype, device=DEVICE),
    }


def random_cache(draw: Draw, cache_format: str, num_pages: int, page_size: int) -> torch.Tensor:
    layout = kv_cache.get_format(cache_format)
    dtype = layout.record_dtype if layout.plain and layout.record_dtype.itemsize > 1 else torch.bfloat16
    rows = draw.normal(num_pages, page_size, 1, layout.head_dim, dtype=dtype)
    return kv_cache.pack(rows, layout, scale=0.02 if layout.takes_scale else None)


def scale_of(cache_format: str, *, on_device: bool) -> torch.Tensor | float | None:
    if cache_format != "fp8":
        return None
    return torch.full((1,), 0.02, device=DEVICE) if on_device else 0.02


def write(cache: torch.Tensor, arguments: Arguments) -> None:
    with harness.refusals_skip(BACKEND):
        kv_cache.write(cache, **arguments, backend=BACKEND)


def gather(arguments: Arguments) -> torch.Tensor:
    with harness.refusals_skip(BACKEND):
        return kv_cache.gather(**arguments, backend=BACKEND)


def reference_rows(arguments: Arguments) -> torch.Tensor:
    out = torch.full_like(arguments["out"], torch.nan)
    return kv_cache.gather(**harness.replaced(arguments, out=out), backend="reference")


def assert_gathers_right(arguments: Arguments) -> None:
    assert_same_rows(gather(arguments), reference_rows(arguments))


def assert_same_rows(rows: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_bytes(cache: torch.Tensor, expected: torch.Tensor) -> None:
    differ = harness.bits(cache) != harness.bits(expected)
    assert not differ.any(), f"{int(differ.sum())} elements differ, the first at {differ.nonzero()[0].tolist()}"
