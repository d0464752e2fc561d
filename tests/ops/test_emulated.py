"""Compiled kernels, emulated on the CPU, against the reference implementations: Hopper's of all operations, and the
portable ones of attention, which Triton's interpreter runs uncompiled."""

# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.marks import mostly_full

import flashlatte
from flashlatte.runtime import machine
from flashlatte.testing import compare
from flashlatte.testing.cases import DenseDecodeCase, DensePrefillCase, SparseDecodeCase, SparsePrefillCase

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="imports Gluon kernels")

E4M3 = torch.float8_e4m3fn
OUT = compare.Tolerance(abs=1e-2, rel=2**-6, cos=1e-5)
STATISTICS = compare.Tolerance(abs=1e-4, rel=1e-4, cos=1e-6)
# Logits of up to 100. Each of the four e4m3 products of a query's and a key's 128 elements keeps 14 bits of the sum.
LOGITS = compare.Tolerance(abs=0.1, rel=1e-3, cos=1e-6)


def check(
    operation: Callable[..., Any],
    arguments: dict[str, Any],
    emulate: Callable[..., Any],
    *,
    seed: int,
    backend: str = "hopper",
    statistics: compare.Tolerance = STATISTICS,
    **options: Any,
) -> None:
    expected = operation(**arguments, backend="reference")
    emulate(seed=seed, **options)
    results = operation(**arguments, backend=backend)
    for i, (result, reference) in enumerate(zip(_tuple(results), _tuple(expected), strict=True)):
        assert result.isfinite().any() or not reference.isfinite().any()
        compare.assert_close(result, reference, statistics if result.dtype == torch.float32 else OUT, f"result {i}")


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


# The number of SMs decides how the keys are split: with few splits, or in ranges that fp24_combine combines.
DENSE_DECODE = {
    # The variant that the tests of machine code compile, too.
    "one request": (8, DenseDecodeCase(1, 1, 100, 64)),
    "few heads": (8, DenseDecodeCase(1, 1, 100, 16)),
    "ranges": (24, DenseDecodeCase(2, 1, 700, 64, varlen=True)),
    "row groups": (8, DenseDecodeCase(5, 1, 500, 128, page_size=16, varlen=True)),
    "fp24 partial outputs": (40, DenseDecodeCase(2, 1, 1500, 128, varlen=True)),
    "e4m3": (16, DenseDecodeCase(3, 1, 600, 128, varlen=True, cache_dtype=E4M3)),
    "e4m3, few rows": (8, DenseDecodeCase(2, 1, 500, 16, varlen=True, cache_dtype=E4M3)),
    "causal": (16, DenseDecodeCase(2, 2, 600, 64, varlen=True, causal=True)),
    "empty requests": (16, DenseDecodeCase(4, 1, 400, 32, varlen=True, zero_lengths=True)),
    "without rope": (16, DenseDecodeCase(2, 1, 500, 128, head_dim=512)),
    "pages of 16": (16, DenseDecodeCase(2, 1, 300, 64, page_size=16, varlen=True, strided=True)),
    "fp16": (8, DenseDecodeCase(2, 1, 300, 3, dtype=torch.float16)),
}


@pytest.mark.parametrize("name", mostly_full(DENSE_DECODE, "one request"))
def test_dense_decode(emulation, name):
    num_sms, case = DENSE_DECODE[name]
    check(flashlatte.dense_decode, case.inputs(), emulation, seed=1, num_sms=num_sms)


SPARSE_DECODE = {
    "one block": (8, SparseDecodeCase(2, 1, 300, 16, 128)),
    "cluster": (8, SparseDecodeCase(2, 1, 300, 128, 192)),
    "ranges": (16, SparseDecodeCase(2, 2, 500, 128, 256, topk_lengths="token", extra_topk=64, extra_s_k=100)),
    "model1": (12, SparseDecodeCase(2, 1, 400, 64, 128, "model1", extra_topk=128, extra_s_k=200)),
    "v41": (12, SparseDecodeCase(2, 1, 400, 128, 128, "v41", topk_lengths="request")),
    "v41_fp4": (12, SparseDecodeCase(2, 1, 400, 128, 128, "v41_fp4", topk_lengths="request")),
    "v41_fp4, one block": (8, SparseDecodeCase(2, 1, 300, 16, 128, "v41_fp4", extra_topk=64, extra_s_k=90)),
    "v41_fp4, 64 heads": (8, SparseDecodeCase(2, 1, 300, 64, 130, "v41_fp4", page_size=61, duplicates=True)),
    "v32_no_rope": (12, SparseDecodeCase(2, 1, 400, 128, 192, "v32_no_rope", topk_lengths="request")),
    "bf16": (8, SparseDecodeCase(2, 1, 300, 128, 130, "bf16", head_dim=576)),
    "bf16 without rope": (8, SparseDecodeCase(2, 1, 300, 64, 130, "bf16", head_dim=512, topk_lengths="token")),
    "odd pages": (8, SparseDecodeCase(2, 1, 300, 128, 128, "model1", page_size=61, duplicates=True, empty_rows=0.5)),
}


@pytest.mark.parametrize("name", mostly_full(SPARSE_DECODE))
def test_sparse_decode(emulation, name):
    num_sms, case = SPARSE_DECODE[name]
    check(flashlatte.sparse_decode, case.inputs(), emulation, seed=2, num_sms=num_sms)


SPARSE_PREFILL = {
    "typical": SparsePrefillCase(2, 200, 128, 130, topk_lengths=True),
    "64 heads without rope": SparsePrefillCase(3, 200, 64, 100, head_dim=512, empty_rows=0.3),
    "few heads": SparsePrefillCase(2, 90, 3, 64, duplicates=True, strided=True),
}


@pytest.mark.parametrize("name", mostly_full(SPARSE_PREFILL))
def test_sparse_prefill(emulation, name):
    check(flashlatte.sparse_prefill, SPARSE_PREFILL[name].inputs(), emulation, seed=3)


DENSE_PREFILL = {
    "causal": DensePrefillCase(2, 130, 150, 4, 2, causal=True, varlen=True),
    "window": DensePrefillCase(2, 100, 200, 2, 1, window=(60, 10), varlen=True, seed=1),
    "128": DensePrefillCase(1, 140, 140, 2, 2, head_dim=128, d_v=128, causal=True),
}


@pytest.mark.parametrize("name", mostly_full(DENSE_PREFILL))
def test_dense_prefill(emulation, name):
    # Both consumers set the values beyond a request's end to 0, and neither waits for the other.
    arguments = DENSE_PREFILL[name].inputs()
    check(flashlatte.dense_prefill, arguments, emulation, seed=4, finds_races=False)


@pytest.mark.full
def test_paged_attention_of_long_and_short_requests(emulation):
    torch.manual_seed(0)
    arguments = {
        "q": torch.randn(135, 8, 128).bfloat16(),
        "k_cache": torch.randn(10, 64, 2, 128).bfloat16(),
        "v_cache": torch.randn(10, 64, 2, 128).bfloat16(),
        "block_table": torch.randperm(10).reshape(2, 5).int(),
        "seqused_k": torch.tensor([100, 300], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 5, 135], dtype=torch.int32),
        "causal": True,
    }
    check(flashlatte.paged_attention, arguments, emulation, seed=5, finds_races=False)


@pytest.mark.full
@pytest.mark.parametrize("heads", [8, 64])
def test_index_logits(emulation, heads):
    torch.manual_seed(0)
    end = torch.randint(0, 301, (70,), dtype=torch.int32)
    arguments = {
        "q": torch.randn(70, heads, 128).to(E4M3),
        "k": torch.randn(300, 128).to(E4M3),
        "weights": torch.randn(70, heads),
        "key_start": (end * torch.rand(70)).int(),
        "key_end": end,
        "k_scale": torch.rand(300),
    }
    check(flashlatte.index_logits, arguments, emulation, seed=6, num_sms=4, statistics=LOGITS)


# Lengths of the requests or of their queries, heads, queries of a request, page size, SMs.
PAGED_INDEX_LOGITS = {
    "8 heads": ([200, 3, 90], 8, 1, 64, 4),
    "16 heads, 2 queries": ([200, 3, 90], 16, 2, 64, 4),
    "64 heads": ([200, 3, 90], 64, 1, 64, 4),
    # 69 tiles on a CTA: more than it looks up at a time, and four times the ring of keys.
    "many tiles": ([4300, 90], 8, 1, 64, 1),
    "pages of 96": ([1500, 0, 700], 8, 1, 96, 2),
    "pages of 128, int64": (torch.tensor([250, 0, 130]), 16, 1, 128, 3),
    "groups of queries": ([[100, 150, 64, 10, 0], [0, 0, 0, 0, 65]], 64, 5, 64, 3),
    # Requests of more than one step of the scan, some of them empty.
    "many requests": ([37 * i % 70 * (i % 3 > 0) for i in range(140)], 8, 1, 64, 5),
    "no keys": ([0, 0], 8, 1, 64, 2),
}


@pytest.mark.parametrize("name", mostly_full(PAGED_INDEX_LOGITS, "64 heads"))
def test_paged_index_logits(emulation, name):
    lengths, heads, next_n, page_size, num_sms = PAGED_INDEX_LOGITS[name]
    torch.manual_seed(0)
    lengths = lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths, dtype=torch.int32)
    requests, columns = len(lengths), max(1, -(-int(lengths.max()) // page_size))
    pages = requests * columns
    keys = torch.randn(pages, page_size * 128).to(E4M3).view(torch.uint8)
    arguments = {
        "q": torch.randn(requests, next_n, heads, 128).to(E4M3),
        "cache": torch.cat((keys, torch.rand(pages, page_size).view(torch.uint8)), 1).view(pages, page_size, 1, 132),
        "weights": torch.randn(requests * next_n, heads),
        "cache_seqlens": lengths,
        "block_table": torch.randperm(pages).reshape(requests, columns).to(lengths.dtype),
    }
    check(flashlatte.paged_index_logits, arguments, emulation, seed=7, num_sms=num_sms, statistics=LOGITS)


@pytest.mark.full
@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 600, 512), (3, 9000, 64), (9, 9000, 128), (2, 4100, 2048)])
def test_topk(emulation, rows, columns, k):
    torch.manual_seed(0)
    logits = torch.randn(rows, columns)
    emulation(num_sms=132, seed=8)
    indices, values = flashlatte.topk(logits, k, return_values=True, backend="hopper")
    expected = logits.topk(k).values
    assert values.sort(1, descending=True).values.equal(expected)
    assert logits.gather(1, indices.long()).equal(values)


PORTABLE = {
    "dense decode": (flashlatte.dense_decode, DenseDecodeCase(2, 1, 300, 16, varlen=True)),
    "three kv heads": (flashlatte.dense_decode, DenseDecodeCase(2, 1, 200, 12, 3, 192, 128, page_size=7, varlen=True)),
    "e4m3": (flashlatte.dense_decode, DenseDecodeCase(2, 2, 200, 16, varlen=True, causal=True, cache_dtype=E4M3)),
    "v32": (flashlatte.sparse_decode, SparseDecodeCase(2, 1, 300, 16, 128, extra_topk=64, extra_s_k=90)),
    "model1": (flashlatte.sparse_decode, SparseDecodeCase(2, 1, 300, 64, 128, "model1", topk_lengths="token")),
    "v41_fp4": (flashlatte.sparse_decode, SparseDecodeCase(2, 1, 300, 16, 128, "v41_fp4")),
    "bf16": (flashlatte.sparse_decode, SparseDecodeCase(2, 1, 300, 64, 130, "bf16", head_dim=576, empty_rows=0.5)),
    "sparse prefill": (flashlatte.sparse_prefill, SparsePrefillCase(2, 200, 16, 130, topk_lengths=True)),
    "dense prefill": (flashlatte.dense_prefill, DensePrefillCase(2, 100, 130, 2, 1, causal=True, varlen=True)),
}


@pytest.mark.parametrize("name", mostly_full(PORTABLE))
def test_portable(emulation, name):
    operation, case = PORTABLE[name]
    check(operation, case.inputs(), emulation, seed=9, backend="portable")
