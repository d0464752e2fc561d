"""FlashInfer's wrappers on a GPU: kernels against float64, CUDA graphs with changed plans, no synchronization."""

# Tuples and dicts of arguments are unpacked.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE
from support.flashinfer_calls import MLARequests, buffers, split

from flashlatte import flashinfer
from flashlatte.flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashlatte.flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

pytestmark = pytest.mark.gpu


def requests(counts: list[int], lengths: list[int], page_size: int, **fields: Any) -> MLARequests:
    fields = {"heads": 16, "dtype": torch.bfloat16, "sm_scale": 0.05, "causal": True} | fields
    return MLARequests(counts, lengths, page_size, latent=512, rope=64, device="cuda", **fields)


def wrapper_for(backend: str = "auto", **options: Any) -> BatchMLAPagedAttentionWrapper:
    return BatchMLAPagedAttentionWrapper(torch.empty(16, dtype=torch.uint8, device=DEVICE), backend=backend, **options)


def assert_right(results: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 3, 3], [2, 0, 5]])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_kernels(counts: list[int], page_size: int, heads: int) -> None:
    case = requests(counts, [300, 7, 1000], page_size, heads=heads)
    wrapper = wrapper_for()
    case.plan(wrapper)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = case.run(wrapper)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(results, case.expected())


def test_fp8_cache() -> None:
    case = requests([2, 2], [300, 70], 64, kv_dtype=torch.float8_e4m3fn)
    wrapper = wrapper_for("fa3")
    case.plan(wrapper)
    assert_right(case.run(wrapper, ckv_scale=0.5, kpe_scale=0.5), case.expected(k_scale=0.5))


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("queries", [1, 2])
def test_a_graph_computes_what_later_plans_say(page_size: int, queries: int) -> None:
    first = requests([queries] * 4, [3, 0, 9, 30], page_size)
    wrapper = wrapper_for(**buffers(first, 4096))
    q = torch.zeros_like(first.q)
    cache = torch.zeros(4096, page_size, 576, dtype=torch.bfloat16, device=DEVICE)
    first.plan(wrapper)
    replay, (out, lse) = harness.captured(lambda: wrapper.run(*split(q, 512), *split(cache, 512), return_lse=True))
    later = [([queries] * 4, [800, 3, 700, 0]), ([queries, queries, 0, 0], [900, 20, 0, 0])]
    if queries == 1 or page_size == 1:
        later.append(([2 * queries, 0, queries, 0], [100, 3, 500, 5]))
    for seed, (counts, lengths) in enumerate(later):
        case = requests(counts, lengths, page_size, seed=seed)
        case.plan(wrapper)
        tokens = len(case.q)
        q[:tokens], cache[: len(case.cache)] = case.q, case.cache
        out.fill_(torch.nan)
        replay()
        assert_right((out[:tokens], lse[:tokens]), case.expected())


def test_queries_in_two_tensors() -> None:
    case = requests([1, 1], [300, 70], 64)
    wrapper = wrapper_for()
    case.plan(wrapper)
    parts = [part.contiguous() for part in split(case.q, 512)]
    assert_right(wrapper.run(*parts, *split(case.cache, 512), return_lse=True), case.expected())


def test_prefill_in_a_graph() -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k = (torch.randn(64, 4, 192, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(64, 4, 128, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    given = [torch.zeros(3, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(q.new_empty(1), "NHD", True, *given)
    dims = (4, 4, 192, 128)

    def plan(target: BatchPrefillWithRaggedKVCacheWrapper, middle: int) -> None:
        boundaries = torch.tensor([0, middle, 64], dtype=torch.int32, device=DEVICE)
        target.plan(boundaries, boundaries, *dims, causal=True, q_data_type=torch.bfloat16)

    plan(wrapper, 10)
    replay, (out, lse) = harness.captured(lambda: wrapper.run_return_lse(q, k, v))
    for middle in (10, 40, 0):
        plan(wrapper, middle)
        replay()
        eager = BatchPrefillWithRaggedKVCacheWrapper(q.new_empty(1), backend="reference")
        plan(eager, middle)
        for result, wanted in zip((out, lse), eager.run_return_lse(q, k, v), strict=True):
            torch.testing.assert_close(result.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_sparse_decode_and_merging() -> None:
    case = requests([1, 1], [300, 70], 64)
    indices = torch.stack([case.tables[row][:1].repeat(64) * 64 + torch.arange(64) for row in range(2)])
    indices = indices.int().to(DEVICE).view(2, 1, 64)
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        case.q.unsqueeze(1), case.cache, case.q.new_empty(1), 128, 512, 64, indices, case.lists[3], 300,
        sparse_mla_top_k=64, bmm1_scale=0.05, return_lse=True,
    )  # fmt: skip
    first = requests([1, 1], [64, 64], 64)
    first.q, first.cache, first.tables = case.q, case.cache, [table[:1] for table in case.tables]
    expected, expected_lse = first.expected()
    assert_right((out.squeeze(1), lse), (expected, expected_lse))
    merged, merged_lse = flashinfer.merge_state(out.squeeze(1), lse, out.squeeze(1), lse)
    assert_right((merged, merged_lse), (expected, expected_lse + 1))
