"""DeepGEMM's logits of candidate blocks of keys, contiguous and in a paged cache."""

import pytest
import torch
from support.deep_gemm_calls import assert_near, draw, drawn_query, generator, logits_of, mxfp8

from flashlatte import deep_gemm, kv_cache
from flashlatte.kv_cache import fp4
from flashlatte.kv_cache.index_formats import quantize_rows
from flashlatte.ops.index_quantize import index_quantize

H, D = 32, 128


def candidates(seed, rows, num_blocks, limit):
    """Candidate blocks of each row: repeats, blocks beyond the keys, DeepGEMM's and SGLang's padding."""
    blocks = torch.randint(0, limit + 2, (rows, num_blocks), generator=generator(seed)).int()
    blocks[:, -1] = 2**31 - 1
    blocks[0, -2] = -1
    return blocks


@pytest.mark.parametrize("backend", ["reference", pytest.param("portable", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "mxfp8"])
def test_candidate_blocks_of_contiguous_keys(kind, unaligned, backend):
    rows, num_keys, heads, size = 5, 90, 20, 8
    q, k, weights = draw(rows, heads, D, seed=0), draw(num_keys, D, seed=1), draw(rows, heads, seed=2)
    start = torch.tensor([0, 8, 16, 40, 80], dtype=torch.int32) + 3 * unaligned
    end = torch.tensor([90, 24, 16, 77, 95], dtype=torch.int32)
    query, q_known = drawn_query(q, kind == "mxfp4")
    if kind == "fp8":
        kv = quantize_rows(k, "exact")
        k_known = kv[0].double() * kv[1].double().unsqueeze(1)
    elif kind == "mxfp8":
        (query, q_known), (kv, k_known) = mxfp8(q), mxfp8(k)
    else:
        values, scales = fp4.quantize_mxfp4(k)
        kv = values.view(torch.int8), scales.view(torch.int32).squeeze(-1)
        k_known = fp4.dequantize_mxfp4(values, scales)
    exact, bound = logits_of(q_known, k_known, weights), logits_of(q_known.abs(), k_known.abs(), weights.abs())
    blocks = candidates(3, rows, 12, num_keys // size)
    meta = deep_gemm.get_sparse_mqa_logits_metadata(start, end, num_keys, blocks, query[0].dtype, size, unaligned)
    logits = deep_gemm.fp8_fp4_sparse_mqa_logits(query, kv, weights, meta, 12, size, unaligned, backend=backend)
    assert logits.shape == (rows, 12 * size)
    seen_keys = 0
    for row in range(rows):
        for column in range(12 * size):
            key = int(blocks[row, column // size]) * size + (int(start[row]) % size) * unaligned + column % size
            if int(start[row]) <= key < min(int(end[row]), num_keys):
                assert_near(logits[row, column], exact[row, key], bound[row, key], torch.float32)
                seen_keys += 1
            else:
                assert logits[row, column] == -torch.inf
    assert seen_keys > 60


@pytest.mark.parametrize("backend", ["reference", pytest.param("portable", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("mxfp4", [False, True])
def test_candidate_blocks_of_a_paged_cache(mxfp4, backend):
    rows, pages, page_size, heads, size = 4, 7, 16, 32, 8
    q, weights = draw(rows, 1, heads, D, seed=0), draw(rows, heads, seed=1).bfloat16()
    kind = "index_mxfp4" if mxfp4 else "index_fp8"
    cache = kv_cache.allocate(kind, pages, page_size)
    index_quantize(cache, torch.arange(pages * page_size), draw(pages * page_size, D, seed=2), backend="reference")
    table = torch.randint(0, pages, (rows, 4), generator=generator(4)).int()
    table[3, 1] = 10**6
    lengths = torch.tensor([64, 0, 13, 60], dtype=torch.int32)
    query, q_known = drawn_query(q, mxfp4)
    blocks = candidates(5, rows, 8, 8)
    meta = deep_gemm.get_paged_sparse_mqa_logits_metadata(lengths, table, None, page_size, blocks, torch.int8, size)
    logits = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(query, cache, weights, meta, 8, size, backend=backend)
    assert (logits.shape, logits.dtype) == ((rows, 64), torch.bfloat16)
    stored = kv_cache.unpack(cache, kind, dtype=torch.float32)[:, :, 0]
    seen_keys = 0
    for row in range(rows):
        for column in range(64):
            position = int(blocks[row, column // size]) * size + column % size
            page = int(table[row, position // page_size]) if 0 <= position < int(lengths[row]) else -1
            if not 0 <= page < pages:
                assert logits[row, column] == -torch.inf
                continue
            keys = stored[page, position % page_size].unsqueeze(0)
            exact = logits_of(q_known[row], keys, weights[row : row + 1])
            bound = logits_of(q_known[row].abs(), keys.abs(), weights[row : row + 1].abs())
            assert_near(logits[row, column], exact[0, 0], bound[0, 0], torch.bfloat16)
            seen_keys += 1
    assert seen_keys > 50


def test_errors():
    rows, num_keys = 37, 290
    q, k, weights = draw(rows, H, D, seed=0).to(torch.float8_e4m3fn), draw(num_keys, D, seed=1), draw(rows, H, seed=2)
    kv, blocks = quantize_rows(k, "exact"), torch.zeros(rows, 4, dtype=torch.int32)
    start = torch.arange(rows, dtype=torch.int32)
    end = start + 40
    meta = deep_gemm.get_sparse_mqa_logits_metadata(start, end, num_keys, blocks, torch.float8_e4m3fn, 8, True)
    with pytest.raises(ValueError, match=r"^metadata must have shape \[37, 5, 2\]"):
        deep_gemm.fp8_fp4_sparse_mqa_logits(q, kv, weights, meta, 5, 8)
    with pytest.raises(TypeError, match=r"^sparse_kv_block_indices must be int32 or int64, got float32$"):
        deep_gemm.get_sparse_mqa_logits_metadata(start, end, num_keys, blocks.float(), torch.int8, 8)
    with pytest.raises(ValueError, match=r"^sparse_block_kv must divide page_kv, 60, got 8$"):
        deep_gemm.get_paged_sparse_mqa_logits_metadata(end, blocks, None, 60, blocks, torch.int8, 8)
    cache = kv_cache.allocate("index_fp8", 2, 4)
    with pytest.raises(ValueError, match=r"^sparse_block_kv must divide the page size, 4, got 8$"):
        deep_gemm.fp8_fp4_paged_sparse_mqa_logits(q.unsqueeze(1), cache, weights, meta, 4, 8)
    with pytest.raises(ValueError, match=r"^q must have shape \[rows, 1, H, D\]"):
        deep_gemm.fp8_fp4_paged_sparse_mqa_logits(q, cache, weights, meta, 4, 4)
