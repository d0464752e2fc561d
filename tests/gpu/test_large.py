"""Inputs of a size that needs a GPU: much work per SM, caches and results beyond 2^31 elements.

The Gluon and Triton kernels, which share little code, are compared; smaller tests compare both with the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments

import flashlatte
from flashlatte import kv_cache
from flashlatte.ops.index_logits import index_logits, paged_index_logits
from flashlatte.ops.index_select import index_select, paged_index_select
from flashlatte.ops.topk import topk
from flashlatte.testing import compare
from flashlatte.testing.cases import DenseDecodeCase, DensePrefillCase, SparseDecodeCase, SparsePrefillCase
from flashlatte.testing.paged_attention_case import PagedAttentionCase

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
DECODES = {
    "half a million keys": DenseDecodeCase(2, 1, 500_000, 128, varlen=True),
    "a million keys, four queries": DenseDecodeCase(1, 4, 1_000_000, 16, causal=True),
    "cache beyond 2^31 numbers": DenseDecodeCase(1, 1, 4_000_000, 64),
    "a thousand requests": DenseDecodeCase(1000, 1, 1500, 16, varlen=True, zero_lengths=True),
    "three hundred requests, two queries": DenseDecodeCase(300, 2, 3000, 128, varlen=True, causal=True),
    "pages of 16": DenseDecodeCase(6, 1, 150_000, 128, page_size=16, varlen=True),
    "pages of 32, e4m3": DenseDecodeCase(40, 2, 30_000, 128, page_size=32, varlen=True, cache_dtype=E4M3),
    "e4m3 beyond 2^31 bytes": DenseDecodeCase(2, 1, 2_000_000, 16, cache_dtype=E4M3),
    "e4m3, 128 heads": DenseDecodeCase(3, 1, 300_000, 128, varlen=True, cache_dtype=E4M3),
    "64 heads, lengths far apart": DenseDecodeCase(64, 1, 40_000, 64, varlen=True, zero_lengths=True),
}
SPARSE_DECODES = {
    "v32 beyond 2^31 bytes": SparseDecodeCase(400, 2, 10_000, 128, 2048, varlen=True),
    "v32, 16 heads": SparseDecodeCase(1000, 1, 3000, 16, 2048, topk_lengths="token"),
    "v32, long selections": SparseDecodeCase(40, 2, 40_000, 64, 16_384, varlen=True),
    "model1": SparseDecodeCase(500, 2, 4000, 128, 128, cache_format="model1", extra_topk=1024, extra_s_k=3000),
    "model1, 64 heads": SparseDecodeCase(
        700, 1, 2000, 64, 128, cache_format="model1", extra_topk=512, extra_s_k=900, extra_page_size=2
    ),
    "bf16 beyond 2^31 numbers": SparseDecodeCase(400, 1, 10_000, 128, 2048, cache_format="bf16"),
}
PREFILLS = {
    "many short requests": DensePrefillCase(1500, 100, 130, 16, 16, causal=True, varlen=True, zero_lengths=True),
    "few of any length": DensePrefillCase(7, 9000, 9000, 16, 4, head_dim=128, causal=True, varlen=True),
    "one long": DensePrefillCase(1, 70_000, 70_000, 4, 4, causal=True),
    "results beyond 2^31 numbers": DensePrefillCase(3, 45_000, 45_000, 128, 16, window=(700, 0)),
    "head dim 64": DensePrefillCase(20, 5000, 6000, 16, 16, head_dim=64, d_v=64, causal=True, varlen=True),
    "head dim 256": DensePrefillCase(20, 3000, 3000, 8, 2, head_dim=256, d_v=256, causal=True, varlen=True),
}
PAGED = {
    "half a million keys": PagedAttentionCase(2, 1, 500_000, 32, 8, page_size=64, varlen=True),
    # A program sums over all keys of a request: with two million, rounding of the sum would lose accuracy.
    "caches beyond 2^31 numbers": PagedAttentionCase(10, 3, 220_000, 16, 8, page_size=64),
    "a thousand decodes": PagedAttentionCase(4, 200, 3000, 32, 8, page_size=16, varlen=True, decodes=1000),
    "a long prompt": PagedAttentionCase(2, 30_000, 5000, 32, 8, page_size=64, varlen=True),
    "a long prompt, pages of 16": PagedAttentionCase(3, 9000, 9000, 32, 4, page_size=16, varlen=True, window=4000),
    "many prompts": PagedAttentionCase(600, 150, 700, 16, 2, page_size=32, varlen=True, zero_lengths=True, unowned=9),
    "e4m3": PagedAttentionCase(
        60, 1, 60_000, 32, 8, page_size=64, varlen=True, cache_dtype=E4M3, scale_kind="head", decodes=40
    ),
}


@pytest.fixture(autouse=True)
def _begin_empty() -> None:
    torch.manual_seed(0)
    torch.cuda.empty_cache()


def attend(operation: str, arguments: Arguments, backend: str) -> dict[str, torch.Tensor]:
    with harness.refusals_skip(backend):
        results = getattr(flashlatte, operation)(**arguments, backend=backend)
    return dict(zip(("out", "lse"), (results[0], results[-1]), strict=True))


def check(operation: str, arguments: Arguments, out: compare.Tolerance, lse: compare.Tolerance) -> None:
    ours = attend(operation, arguments, "hopper")
    harness.assert_same_bits(ours, attend(operation, arguments, "hopper"))
    other = attend(operation, arguments, "portable")
    compare.assert_close(ours["lse"], other["lse"], lse, "lse")
    # In parts, as they are compared in float64.
    at_a_time = max(1, 2**28 // ours["out"][0].numel())
    for first, second in zip(ours["out"].split(at_a_time), other["out"].split(at_a_time), strict=True):
        compare.assert_close(first, second, out, "out")


@pytest.mark.parametrize("name", DECODES)
def test_dense_decode(name: str) -> None:
    check("dense_decode", DECODES[name].inputs(DEVICE), compare.DENSE_DECODE_OUT, compare.DECODE_LSE)


@pytest.mark.parametrize("name", SPARSE_DECODES)
def test_sparse_decode(name: str) -> None:
    check("sparse_decode", SPARSE_DECODES[name].inputs(DEVICE), compare.SPARSE_DECODE_OUT, compare.DECODE_LSE)


@pytest.mark.parametrize("head_dim", [576, 512])
def test_sparse_prefill_of_many_queries(head_dim: int) -> None:
    arguments = SparsePrefillCase(20_000, 30_000, 64, 1024, head_dim=head_dim, empty_rows=0.1).inputs(DEVICE)
    check("sparse_prefill", arguments, compare.SPARSE_PREFILL_OUT, compare.SPARSE_PREFILL_LSE)


def test_sparse_prefill_over_keys_beyond_2_31_numbers() -> None:
    tokens = 2**31 // 576 + 90_000
    arguments = {
        "q": torch.randn(600, 128, 576, device=DEVICE, dtype=torch.bfloat16) / 10,
        "kv": torch.randn(tokens, 1, 576, device=DEVICE, dtype=torch.bfloat16),
        "indices": torch.randint(0, tokens, (600, 1, 2048), device=DEVICE, dtype=torch.int32),
    }
    arguments["indices"][:, :, :600] = torch.randint(2**31 // 576, tokens, (600, 1, 600), device=DEVICE)
    check("sparse_prefill", arguments, compare.SPARSE_PREFILL_OUT, compare.SPARSE_PREFILL_LSE)


@pytest.mark.parametrize("name", PREFILLS)
def test_dense_prefill(name: str) -> None:
    check("dense_prefill", PREFILLS[name].inputs(DEVICE), compare.DENSE_PREFILL_OUT, compare.DENSE_PREFILL_LSE)


@pytest.mark.parametrize("name", PAGED)
def test_paged_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashlatte.ops.paged_attention.api.HOPPER_MIN_ROWS", -(2**31))
    arguments = PAGED[name].inputs(DEVICE)
    check("paged_attention", arguments, compare.DENSE_PREFILL_OUT, compare.Tolerance(1e-4, 1e-5))


def same_logits(ours: torch.Tensor, other: torch.Tensor) -> None:
    """Compare with another order of summation, a part of a row at a time, since there may be more than 2^31 logits."""
    for first, second in zip(ours.split(512), other.split(512), strict=True):
        assert first.isneginf().equal(second.isneginf())
        # Sums of 64 products of a weight and a nonnegative number; the largest of a row bounds the cancellation.
        bound = 2e-4 * second.masked_fill(second.isneginf(), 0).abs().amax(dim=1, keepdim=True)
        assert ((first - second).abs().nan_to_num(0.0) <= bound).all()


@pytest.mark.parametrize(
    ("rows", "keys", "heads"), [(4096, 131_072, 64), (20_000, 110_000, 32), (37, 1_000_000, 64), (9000, 9000, 128)]
)
def test_index_logits(rows: int, keys: int, heads: int) -> None:
    arguments: dict[str, Any] = {
        "q": torch.randn(rows, heads, 128, device=DEVICE).to(E4M3),
        "k": torch.randn(keys, 128, device=DEVICE).to(E4M3),
        "weights": torch.randn(rows, heads, device=DEVICE),
        "k_scale": torch.rand(keys, device=DEVICE) + 0.5,
        "key_start": torch.randint(0, keys // 3, (rows,), device=DEVICE, dtype=torch.int32),
        "key_end": torch.randint(0, keys + 9, (rows,), device=DEVICE, dtype=torch.int32),
    }
    ours, other = (index_logits(**arguments, backend=backend) for backend in harness.KERNEL_BACKENDS)
    same_logits(ours, other)


def paged_arguments(requests: int, next_n: int, longest: int, page_size: int = 64) -> Arguments:
    pages = -(-longest // page_size)
    cache = kv_cache.allocate("index_fp8", requests * pages, page_size, device=DEVICE)
    slots = torch.arange(cache.shape[0] * page_size, device=DEVICE)
    for part in slots.split(1 << 21):
        flashlatte.index_quantize(cache, part, torch.randn(len(part), 128, device=DEVICE), backend="portable")
    lengths = torch.randint(0, longest + 1, (requests,), device=DEVICE, dtype=torch.int32)
    lengths[0] = longest
    return {
        "q": torch.randn(requests, next_n, 64, 128, device=DEVICE).to(E4M3),
        "cache": cache,
        "weights": torch.randn(requests * next_n, 64, device=DEVICE),
        "cache_seqlens": lengths,
        "block_table": torch.randperm(cache.shape[0], device=DEVICE).int().view(requests, pages),
    }


PAGED_LOGITS = [(64, 1, 131_072, 64), (4, 2, 1_000_000, 64), (1, 1, 1_000_000, 16), (300, 3, 30_000, 64)]


@pytest.mark.parametrize(("requests", "next_n", "longest", "page_size"), PAGED_LOGITS)
def test_paged_index_logits(requests: int, next_n: int, longest: int, page_size: int) -> None:
    arguments = paged_arguments(requests, next_n, longest, page_size)
    with harness.refusals_skip("hopper"):
        ours = paged_index_logits(**arguments, backend="hopper")
    same_logits(ours, paged_index_logits(**arguments, backend="portable"))


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize(("requests", "next_n", "longest", "page_size"), PAGED_LOGITS)
def test_paged_index_select_is_of_its_logits(
    requests: int, next_n: int, longest: int, page_size: int, slots: bool
) -> None:
    arguments = paged_arguments(requests, next_n, longest, page_size)
    with harness.refusals_skip("hopper"):
        logits = paged_index_logits(**arguments, backend="hopper")
        chosen = paged_index_select(**arguments, num_selected=2048, slots=slots, backend="hopper")
    ends = arguments["cache_seqlens"].repeat_interleave(next_n) - next_n + 1
    ends += torch.arange(next_n, device=DEVICE, dtype=torch.int32).repeat(requests)
    expected = topk(logits, 2048, end=ends.clamp(min=0), backend="portable")
    assert isinstance(expected, torch.Tensor)
    if slots:
        table = arguments["block_table"].repeat_interleave(next_n, 0)
        page = table.gather(1, (expected.clamp(min=0) // page_size).long())
        expected = torch.where(expected < 0, -1, page * page_size + expected % page_size)
    assert chosen.sort().values.equal(expected.sort().values.int())


@pytest.mark.parametrize(("rows", "keys"), [(3000, 400_000), (12_000, 60_000)])
def test_index_select_is_of_its_logits(rows: int, keys: int) -> None:
    arguments: dict[str, Any] = {
        "q": torch.randn(rows, 64, 128, device=DEVICE).to(E4M3),
        "k": torch.randn(keys, 128, device=DEVICE).to(E4M3),
        "weights": torch.randn(rows, 64, device=DEVICE),
        "k_scale": torch.rand(keys, device=DEVICE) + 0.5,
        "key_start": torch.randint(0, keys // 3, (rows,), device=DEVICE, dtype=torch.int32),
        "key_end": torch.randint(0, keys + 9, (rows,), device=DEVICE, dtype=torch.int32),
    }
    chosen = index_select(**arguments, num_selected=2048, backend="hopper")
    logits = index_logits(**arguments, backend="hopper")
    expected = topk(logits, 2048, start=arguments["key_start"], end=arguments["key_end"], backend="portable")
    assert isinstance(expected, torch.Tensor)
    assert chosen.sort().values.equal(expected.sort().values)


@pytest.mark.parametrize(("rows", "width", "k"), [(20_000, 131_072, 2048), (3, 2**23, 4096), (1500, 2**20, 512)])
def test_topk(rows: int, width: int, k: int) -> None:
    logits = torch.randn(rows, width, device=DEVICE)
    end = torch.randint(0, width + 5, (rows,), device=DEVICE, dtype=torch.int32)
    with harness.refusals_skip("hopper"):
        ours = topk(logits, k, end=end, backend="hopper")
    other = topk(logits, k, end=end, backend="portable")
    assert isinstance(ours, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    assert ours.equal(other)
