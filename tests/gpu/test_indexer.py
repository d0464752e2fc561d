"""The sparse-attention indexer on a GPU: every backend compared with the reference, bitwise if the result is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE

from flashlatte import kv_cache
from flashlatte.kv_cache.fp4 import quantize_mxfp4
from flashlatte.kv_cache.index_formats import INDEX_FORMATS, quantize_rows
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.index_logits import index_logits, paged_index_logits
from flashlatte.ops.index_quantize import index_gather, index_quantize
from flashlatte.ops.index_query import index_query
from flashlatte.ops.index_select import index_select, paged_index_select
from flashlatte.ops.index_weights import index_weights
from flashlatte.ops.topk import topk

pytestmark = pytest.mark.gpu

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
NAN_BYTE = 0x7F
DEEP_GEMMS_BOUND = 5e-6


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, device=DEVICE, dtype=dtype)


def assert_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """DeepGEMM's measure, and -inf at the same positions."""
    seen = ~expected.isneginf()
    assert actual.isneginf().equal(~seen)
    x, y = actual[seen].double(), expected[seen].double()
    if len(x):
        assert x.isfinite().all()
        assert float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum())) < DEEP_GEMMS_BOUND


def contiguous_keys(kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = normal(count, 128)
    if kind == "e4m3":
        return quantize_rows(x, "exact")
    return quantize_mxfp4(x) if kind == "e2m1" else (x.to(BF16), None)


RAGGED = harness.pairwise(
    {
        "backend": harness.KERNEL_BACKENDS,
        "rows": (1, 37, 300),
        "keys": (1, 700, 5000),
        "heads": (8, 20, 32, 64, 128),
        "kind": ("e4m3", "bf16", "e2m1"),
        "queries": (E4M3, BF16),
        "width": (None, 512),
        "clean": (False, True),
    },
    # The reference takes long otherwise.
    lambda row: row.get("rows", 1) * row.get("keys", 1) * row.get("heads", 1) <= 40_000_000,
)


@pytest.mark.parametrize("row", RAGGED, ids=harness.ids(RAGGED))
def test_ragged_logits(row: dict[str, Any]) -> None:
    rows, num_keys, clean, width = row["rows"], row["keys"], row["clean"], row["width"]
    k, k_scale = contiguous_keys(row["kind"], num_keys)
    start, end = integers(-5, num_keys, rows), integers(0, num_keys + 9, rows)
    key = torch.arange(num_keys, device=DEVICE)
    unseen = ~((key >= start.unsqueeze(1)) & (key < end.unsqueeze(1))).any(dim=0)
    if row["kind"] == "e4m3":
        k.view(torch.uint8)[unseen] = NAN_BYTE
    elif row["kind"] == "bf16":
        k[unseen] = torch.nan
    arguments: dict[str, Any] = {
        "q": normal(rows, row["heads"], 128, dtype=row["queries"]),
        "k": k,
        "weights": normal(rows, row["heads"]),
        "key_start": start,
        "key_end": end,
        "k_scale": k_scale,
        "max_keys": width,
    }
    expected = index_logits(**arguments, backend="reference")
    with harness.refusals_skip(row["backend"]):
        out = torch.full_like(expected, torch.nan)
        actual = index_logits(**arguments, clean=clean, out=out, backend=row["backend"])
    again = index_logits(**arguments, clean=clean, out=torch.full_like(expected, torch.nan), backend=row["backend"])
    harness.assert_same_bits({"logits": actual}, {"logits": again})
    if not clean:
        actual = actual.masked_fill(expected.isneginf(), -torch.inf)
    assert_logits(actual, expected)


# Keys in float32 take queries in float32 alone.
NARROW_FORMATS = tuple(name for name in INDEX_FORMATS if INDEX_FORMATS[name].encoding != "fp32")
PAGED = harness.pairwise(
    {
        "backend": harness.KERNEL_BACKENDS,
        "requests": (1, 5, 140),
        "next_n": (1, 2, 3),
        "heads": (8, 16, 20, 32, 64, 128),
        "page_size": (1, 48, 64, 256),
        "cache_format": NARROW_FORMATS,
        "queries": (E4M3, BF16),
        "per_token": (False, True),
        "clean": (False, True),
    }
)


@pytest.mark.parametrize("stride", [128, 129, 137, 144])
def test_ragged_logits_of_queries_at_any_stride(stride: int) -> None:
    """The Hopper kernel requires rows at multiples of 16 bytes; the portable kernel supports others."""
    q = normal(50, 32, stride).to(E4M3)[..., :128]
    k, k_scale = quantize_rows(normal(700, 128), "exact")
    start, end = integers(0, 50, 50), integers(50, 700, 50)
    arguments = (q, k, normal(50, 32), start, end)
    expected = index_logits(*arguments, k_scale=k_scale, backend="reference")
    assert_logits(index_logits(*arguments, k_scale=k_scale), expected)
    if stride % 16 == 0:
        with harness.refusals_skip("hopper"):
            assert_logits(index_logits(*arguments, k_scale=k_scale, backend="hopper"), expected)
    else:
        with pytest.raises(ValueError, match=r"^backend='hopper' cannot serve this call of index_logits: it "):
            index_logits(*arguments, k_scale=k_scale, backend="hopper")


def paged_arguments(
    requests: int, next_n: int, heads: int, page_size: int, cache_format: str, queries: torch.dtype, longest: int = 900
) -> dict[str, Any]:
    pages = -(-longest // page_size)
    cache = kv_cache.allocate(cache_format, requests * pages, page_size, device=DEVICE)
    table = torch.randperm(requests * pages, device=DEVICE).int().view(requests, pages)
    lengths = integers(0, longest + 1, requests)
    lengths[0] = longest
    slots = torch.arange(cache.shape[0] * page_size, device=DEVICE)
    index_quantize(cache, slots, normal(len(slots), 128), backend="reference")
    return {
        "q": normal(requests, next_n, heads, 128, dtype=queries),
        "cache": cache,
        "weights": normal(requests * next_n, heads),
        "cache_seqlens": lengths,
        "block_table": table,
    }


@pytest.mark.parametrize("row", PAGED, ids=harness.ids(PAGED))
def test_paged_logits(row: dict[str, Any]) -> None:
    backend, per_token, clean = row["backend"], row["per_token"], row["clean"]
    shape = {name: value for name, value in row.items() if name not in ("backend", "per_token", "clean")}
    arguments = paged_arguments(**shape)
    arguments["block_table"][-1, -1] = 2**30
    if per_token:
        ends = arguments["cache_seqlens"].unsqueeze(1) - torch.arange(row["next_n"], device=DEVICE)
        arguments["cache_seqlens"] = ends.int()
    expected = paged_index_logits(**arguments, backend="reference")
    with harness.refusals_skip(backend):
        out = torch.full_like(expected, torch.nan)
        actual = paged_index_logits(**arguments, clean=clean, out=out, backend=backend)
    if not clean:
        actual = actual.masked_fill(expected.isneginf(), -torch.inf)
    assert_logits(actual, expected)


@pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
@pytest.mark.parametrize("heads", [8, 16])
def test_paged_logits_of_few_heads_and_many_requests(heads: int, backend: str) -> None:
    """A program has more than one request, so that both slots of its queries are used."""
    arguments = paged_arguments(300, 1, heads, 64, "index_fp8", E4M3)
    expected = paged_index_logits(**arguments, backend="reference")
    assert_logits(paged_index_logits(**arguments, backend=backend), expected)


@pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
@pytest.mark.parametrize("page_size", [32, 64, 256])
@pytest.mark.parametrize("next_n", [1, 2])
def test_paged_logits_of_long_requests(next_n: int, page_size: int, backend: str) -> None:
    """More keys per SM than block table entries that are loaded at once."""
    arguments = paged_arguments(16, next_n, 64, page_size, "index_fp8", E4M3, longest=40000)
    arguments["cache_seqlens"].clamp_(min=30000)
    expected = paged_index_logits(**arguments, backend="reference")
    assert_logits(paged_index_logits(**arguments, backend=backend), expected)


# Of 64 keys: as vLLM lays DeepSeek-V4's, at a multiple of 576 bytes, alone and between other layers' pages.
@pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
@pytest.mark.parametrize("page_bytes", [8640, 49_536])
def test_pages_that_stand_apart(page_bytes: int, backend: str) -> None:
    arguments = paged_arguments(20, 2, 64, 64, "index_fp8", E4M3)
    cache, table = arguments["cache"], arguments["block_table"]
    apart = torch.full((len(cache) * page_bytes,), NAN_BYTE, dtype=torch.uint8, device=DEVICE)
    apart = apart.as_strided(cache.shape, (page_bytes, *cache.stride()[1:]))
    apart.copy_(cache)
    elsewhere = dict(arguments, cache=apart)
    assert torch.equal(
        paged_index_logits(**arguments, clean=True, backend=backend),
        paged_index_logits(**elsewhere, clean=True, backend=backend),
    )
    assert torch.equal(
        paged_index_select(**arguments, num_selected=256, slots=True, backend=backend),
        paged_index_select(**elsewhere, num_selected=256, slots=True, backend=backend),
    )
    ends = torch.arange(len(table) + 1, device=DEVICE, dtype=torch.int32) * 900
    first, second = (index_gather(one, table, ends, 900 * len(table), backend="portable") for one in (cache, apart))
    for one, other in zip(first, second, strict=True):
        assert one is not None
        assert other is not None
        assert harness.bits(one).equal(harness.bits(other))


@pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
@pytest.mark.parametrize("for_each_token", [True, False])
@pytest.mark.parametrize("length", [-1, -(2**31) - 1, -(2**32) + 70, -(2**63)])
def test_int64_lengths_below_zero_are_no_keys(length: int, for_each_token: bool, backend: str) -> None:
    arguments = paged_arguments(5, 2, 64, 64, "index_fp8", E4M3)
    lengths = arguments["cache_seqlens"].long()
    if for_each_token:
        lengths = lengths.unsqueeze(1).repeat(1, 2)
    (lengths[:, 1] if for_each_token else lengths)[[1, 3]] = length
    arguments["cache_seqlens"] = lengths
    expected = paged_index_logits(**arguments, backend="reference")
    out = torch.full_like(expected, torch.nan)
    assert_logits(paged_index_logits(**arguments, out=out, backend=backend), expected)


@pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
def test_a_graph_follows_lengths(backend: str) -> None:
    arguments = paged_arguments(8, 2, 64, 64, "index_fp8", E4M3, longest=6000)
    out = torch.empty(16, arguments["block_table"].shape[1] * 64, device=DEVICE)
    with harness.refusals_skip(backend):
        replay, _ = harness.captured(lambda: paged_index_logits(**arguments, out=out, backend=backend))
    for factor in (1.0, 0.0, 0.1, 0.7):
        arguments["cache_seqlens"].copy_((torch.rand(8, device=DEVICE) * 6000 * factor).int())
        out.fill_(torch.nan)
        replay()
        assert_logits(out, paged_index_logits(**arguments, backend="reference"))


@pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
def test_no_new_variants(backend: str) -> None:
    def call(requests: int, keys: int) -> None:
        arguments = paged_arguments(requests, 1, 64, 64, "index_fp8", E4M3, longest=keys)
        logits = paged_index_logits(**arguments, backend=backend)
        topk(logits, 64, end=arguments["cache_seqlens"], backend="portable")

    with harness.refusals_skip(backend):
        call(3, 5000)
    with harness.no_compilation():
        for requests, keys in ((1, 4500), (2, 64 * 100), (16, 4999), (77, 5121)):
            call(requests, keys)


@pytest.mark.parametrize("tokens", [1, 8, 64, 130])
@pytest.mark.parametrize(("heads", "width"), [(64, 7168), (32, 6144), (5, 1001)])
def test_index_weights(tokens: int, heads: int, width: int) -> None:
    hidden, weight = normal(tokens, width, dtype=BF16), normal(heads, width) * width**-0.5
    result = index_weights(hidden, weight, backend="portable")
    expected = hidden.double() @ weight.double().T
    assert (result - expected).abs().max() < 1e-5
    assert result.equal(index_weights(hidden, weight, backend="portable"))


@pytest.mark.parametrize("cache_format", INDEX_FORMATS)
@pytest.mark.parametrize("rounding", ["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_keys_are_written_and_gathered_as_the_reference_does(
    cache_format: str, rounding: str, dtype: torch.dtype
) -> None:
    k = (normal(1000, 128) * torch.rand(1000, 1, device=DEVICE)).to(dtype)
    slots = torch.randperm(30 * 64, device=DEVICE)[:1000]
    slots[::7] = -1
    caches = [kv_cache.allocate(cache_format, 30, 64, device=DEVICE) for _ in range(2)]
    for cache, backend in zip(caches, ("portable", "reference"), strict=True):
        index_quantize(cache, slots, k, scale_rounding=rounding, backend=backend)
    assert harness.bits(caches[0]).equal(harness.bits(caches[1]))
    table = torch.randperm(30, device=DEVICE)[:28].view(4, 7).int()
    cu_seqlens = torch.tensor([0, 400, 400, 423, 800], device=DEVICE)
    first, second = (
        index_gather(caches[0], table, cu_seqlens, 810, backend=name) for name in ("portable", "reference")
    )
    assert harness.bits(first[0]).equal(harness.bits(second[0]))
    if first[1] is None or second[1] is None:
        assert first[1] is second[1]
    else:
        assert harness.bits(first[1]).equal(harness.bits(second[1]))


@pytest.mark.parametrize("options", [{}, {"rope_first": False, "interleaved": True, "smallest_amax": 1e-4}])
def test_queries(options: dict[str, Any]) -> None:
    (ours, folded), (expected, expected_folded) = both_queries(**options)
    torch.testing.assert_close(folded, expected_folded, rtol=1e-6, atol=0)
    # Fused multiply-adds may round to the other adjacent value.
    apart = (ours.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


def test_queries_after_a_hadamard_transform() -> None:
    """A product with another order of summation, of values rounded to bf16."""
    (ours, folded), (expected, expected_folded) = both_queries(hadamard=True)
    torch.testing.assert_close(folded, expected_folded, rtol=2e-2, atol=0)
    assert (ours.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 0.2


def both_queries(**options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results of the portable and of the reference implementation."""
    q, weights = normal(70, 64, 128, dtype=BF16), normal(70, 64)
    angles = torch.rand(100, 32, device=DEVICE) * 6
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.arange(70, device=DEVICE)
    return [index_query(q, weights, cos_sin, positions, backend=name, **options) for name in ("portable", "reference")]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("compact", [False, True])
def test_converted_indices(dtype: torch.dtype, compact: bool) -> None:
    table = torch.randperm(30, device=DEVICE)[:28].view(4, 7).int()
    arguments: dict[str, Any] = {
        "indices": integers(-5, 7 * 64 + 9, 8, 2048),
        "block_table": table,
        "page_size": 64,
        "next_n": 2,
        "query_positions": torch.arange(8, device=DEVICE) * 50,
        "sinks": 4,
        "window": 60,
        "compact": compact,
        "return_counts": True,
        "dtype": dtype,
    }
    for ours, expected in zip(
        index_convert(**arguments, backend="portable"), index_convert(**arguments, backend="reference"), strict=True
    ):
        assert ours.equal(expected)


@pytest.mark.parametrize("requests", [1, 20])
def test_slots_in_a_graph_follow_lengths(requests: int) -> None:
    """With one request, top-k is launched before the logits' kernel has ended."""
    arguments = paged_arguments(requests, 1, 64, 64, "index_fp8", E4M3, longest=40000)
    lengths = arguments["cache_seqlens"]
    replay, slots = harness.captured(lambda: paged_index_select(**arguments, num_selected=2048, slots=True))
    for length in (40000, 3, 2049, 30011):
        lengths.fill_(length)
        replay()
        positions = topk(paged_index_logits(**arguments), 2048, end=lengths, backend="reference")
        assert isinstance(positions, torch.Tensor)
        assert slots.equal(index_convert(positions, arguments["block_table"], 64, backend="reference"))


def test_selection_is_that_of_its_logits() -> None:
    arguments = paged_arguments(16, 2, 64, 64, "index_fp8", E4M3, longest=20000)
    logits = paged_index_logits(**arguments)
    expected = topk(logits, 2048, end=arguments["cache_seqlens"], next_n=2)
    assert isinstance(expected, torch.Tensor)
    for size in (2**20, 2**26):
        positions = paged_index_select(**arguments, num_selected=2048, workspace_bytes=size)
        assert positions.equal(expected)
    slots = paged_index_select(**arguments, num_selected=2048, slots=True)
    converted = index_convert(expected, arguments["block_table"], 64, next_n=2)
    assert isinstance(converted, torch.Tensor)
    assert slots.equal(converted)

    k, k_scale = contiguous_keys("e4m3", 5000)
    q, weights = normal(300, 64, 128, dtype=E4M3), normal(300, 64)
    end = (torch.arange(300, device=DEVICE) * 16).int()
    expected = topk(index_logits(q, k, weights, end * 0, end, k_scale=k_scale), 512, end=end)
    assert isinstance(expected, torch.Tensor)
    for size in (2**20, 2**28):
        ours = index_select(q, k, weights, end * 0, end, 512, k_scale=k_scale, workspace_bytes=size)
        assert ours.equal(expected)
