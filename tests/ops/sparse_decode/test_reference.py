# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import kv_cache, sparse_decode
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparseDecodeCase
from flashlatte.testing.compare import assert_accurate, assert_close
from flashlatte.testing.draws import BEYOND_INT32, INT32_LIMITS

INF = math.inf
SCALED = ("v32", "v32_no_rope", "model1", "v41", "v41_fp4", "nvfp4_ds_mla")
LENGTHS = st.sampled_from(["all", "request", "token"])


def small_case(dims, formats, **fields):
    """A case in one of the formats: a float format with its dtype and any width, or a tiled one."""
    name, dtype = formats
    if name in SCALED:
        return SparseDecodeCase(cache_format=name, dtype=dtype, **fields)
    head_dim, head_dim_v = dims
    return SparseDecodeCase(cache_format=name, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, **fields)


CASES = st.builds(
    small_case,
    batch=st.integers(1, 3),
    s_q=st.integers(1, 4),
    s_k=st.integers(1, 30),
    h_q=st.integers(1, 5),
    topk=st.integers(1, 20),
    formats=st.sampled_from([("fp32", torch.float32), *((name, torch.float32) for name in SCALED)]),
    dims=st.sampled_from([(24, 16), (7, 7), (5, 1)]),
    page_size=st.integers(1, 9),
    extra_topk=st.sampled_from([0, 1, 6]),
    extra_s_k=st.integers(1, 9),
    extra_page_size=st.integers(1, 4),
    varlen=st.booleans(),
    topk_lengths=LENGTHS,
    extra_topk_lengths=LENGTHS,
    attn_sink=st.booleans(),
    duplicates=st.booleans(),
    invalid_share=st.sampled_from([0.0, 0.3]),
    empty_rows=st.sampled_from([0.0, 0.5, 1.0]),
    zero_lengths=st.booleans(),
    strided=st.booleans(),
    softmax_scale=st.sampled_from([None, 0.01, 1.0]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)


@given(case=CASES, empty_lse=st.sampled_from([INF, -INF]))
def test_float32_against_the_oracle(case, empty_lse):
    inputs = case.inputs()
    out, lse = sparse_decode(**inputs, empty_lse=empty_lse, backend="reference")
    expected_out, expected_lse = oracles.sparse_decode(**inputs, empty_lse=empty_lse)
    assert_close(out, expected_out, compare.FLOAT32, "out")
    assert_close(lse, expected_lse, compare.FLOAT32, "lse")


@pytest.mark.parametrize(
    ("cache_format", "dtype"),
    [
        ("v32", torch.bfloat16),
        ("v32", torch.float16),
        ("model1", torch.bfloat16),
        ("model1", torch.float16),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_half_precision_against_the_oracle(cache_format, dtype):
    case = SparseDecodeCase(
        2, 3, 90, 6, 64, cache_format, page_size=7, extra_topk=20, extra_s_k=50, extra_page_size=3, dtype=dtype
    )
    inputs = case.inputs()
    out, lse = sparse_decode(**inputs, backend="reference")
    expected_out, expected_lse = oracles.sparse_decode(**inputs)
    baseline_out, _ = oracles.sparse_decode(**inputs, dtype=torch.bfloat16)
    assert out.dtype == dtype
    assert_accurate(out, expected_out, baseline_out, "out")
    assert_close(out, expected_out, compare.SPARSE_DECODE_OUT, "out")
    assert_close(lse, expected_lse, compare.DECODE_LSE, "lse")


def small(**fields):
    fields = {"cache_format": "fp32", "head_dim": 24, "head_dim_v": 16, "dtype": torch.float32} | fields
    return SparseDecodeCase(2, 3, 30, 4, 9, page_size=7, **fields).inputs()


def plain_cache(pages, page_size, head_dim):
    return torch.randn(pages, page_size, 1, head_dim, generator=torch.Generator().manual_seed(0))


def test_an_index_is_page_times_page_size_plus_offset():
    cache, q = plain_cache(4, 3, 8), torch.ones(1, 1, 2, 8)
    out, lse = sparse_decode(q, cache, torch.tensor([[[2 * 3 + 1]]]), head_dim_v=5, softmax_scale=0.5)
    torch.testing.assert_close(out, cache[2, 1, 0, :5].expand(1, 1, 2, 5))
    torch.testing.assert_close(lse, (0.5 * cache[2, 1, 0].sum()).expand(1, 2, 1))


def test_the_default_scale_is_of_the_whole_head_dim():
    inputs = small()
    expected = sparse_decode(**(inputs | {"softmax_scale": 24**-0.5}))
    assert sparse_decode(**(inputs | {"softmax_scale": None}))[0].equal(expected[0])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_every_index_outside_the_cache_selects_nothing(index_dtype):
    cache, q = plain_cache(2, 3, 8), torch.ones(1, 1, 2, 8)
    cache[0] = torch.nan
    outside = [-1, -6, 6, 7, *INT32_LIMITS, *(BEYOND_INT32 if index_dtype == torch.int64 else ())]
    indices = torch.tensor([[[*outside, 4]]], dtype=index_dtype)
    alone = torch.tensor([[[4]]])
    for result, expected in zip(
        sparse_decode(q, cache, indices, head_dim_v=8), sparse_decode(q, cache, alone, head_dim_v=8), strict=True
    ):
        torch.testing.assert_close(result, expected)


def test_a_token_selected_twice_counts_twice():
    cache, q = plain_cache(1, 3, 8), torch.ones(1, 1, 1, 8)
    _, once = sparse_decode(q, cache, torch.tensor([[[1]]]), head_dim_v=8)
    _, twice = sparse_decode(q, cache, torch.tensor([[[1, 1]]]), head_dim_v=8)
    torch.testing.assert_close(twice, once + math.log(2))


def test_nan_beyond_topk_length_and_in_unselected_slots_stays_there():
    cache, q = plain_cache(2, 3, 8), torch.ones(1, 2, 2, 8)
    cache[0, 1] = cache[1, 2] = torch.nan
    indices = torch.tensor([[[0, 3, 1, 5], [4, -1, 5, 1]]])
    for length in (torch.tensor([2]), torch.tensor([[2, 1]])):
        out, lse = sparse_decode(q, cache, indices, topk_length=length, head_dim_v=8)
        assert out.isfinite().all()
        assert lse.isfinite().all()
    _, lse = sparse_decode(q, cache, indices, head_dim_v=8)
    assert lse.isnan().all()


@pytest.mark.parametrize("length", [0, -3, -(2**31)])
def test_a_topk_length_of_nothing_empties_the_row(length):
    inputs = small() | {"topk_length": torch.tensor([length, 9], dtype=torch.int32)}
    for empty_lse in (INF, -INF):
        out, lse = sparse_decode(**inputs, empty_lse=empty_lse)
        assert out[0].eq(0).all()
        assert lse[0].eq(empty_lse).all()
        assert lse[1].isfinite().all()


def test_a_topk_length_beyond_topk_is_topk():
    inputs = small()
    expected = sparse_decode(**inputs)
    beyond = sparse_decode(**(inputs | {"topk_length": torch.tensor([10, 2**31 - 1])}))
    for result, wanted in zip(beyond, expected, strict=True):
        assert result.equal(wanted)


def test_topk_length_for_each_token_may_differ():
    inputs = small()
    each = torch.tensor([[3, 0, 9], [1, 5, 2]])
    out, lse = sparse_decode(**(inputs | {"topk_length": each}))
    for token in range(3):
        same = sparse_decode(**(inputs | {"topk_length": each[:, token]}))
        torch.testing.assert_close(out[:, token], same[0][:, token])
        torch.testing.assert_close(lse[..., token], same[1][..., token])


def test_the_sink_scales_out_and_leaves_lse():
    inputs = small(attn_sink=False)
    plain_out, plain_lse = sparse_decode(**inputs)
    sink = torch.tensor([-INF, INF, 0.7, -2.0])
    out, lse = sparse_decode(**(inputs | {"attn_sink": sink}))
    assert lse.equal(plain_lse)
    share = plain_lse.exp() / (plain_lse.exp() + sink.exp()[None, :, None])
    share[:, 1] = 0.0
    torch.testing.assert_close(out, plain_out * share.transpose(1, 2).unsqueeze(-1))
    assert out[:, :, 1].eq(0).all()


@pytest.mark.parametrize("sink", [-INF, INF, 3.0])
def test_a_row_without_keys_is_zero_whatever_the_sink(sink):
    inputs = small(empty_rows=1.0, extra_topk=4, extra_s_k=9) | {"attn_sink": torch.full((4,), sink)}
    for empty_lse in (INF, -INF):
        out, lse = sparse_decode(**inputs, empty_lse=empty_lse)
        assert out.eq(0).all()
        assert lse.eq(empty_lse).all()


def test_the_extra_cache_joins_the_same_softmax():
    both = plain_cache(4, 3, 8)
    q = torch.randn(1, 1, 2, 8)
    expected = sparse_decode(q, both, torch.tensor([[[1, 4, 7, 11]]]), head_dim_v=8)
    joined = sparse_decode(
        q,
        both[:2],
        torch.tensor([[[1, 4]]]),
        extra_k_cache=both[2:].reshape(6, 1, 1, 8),
        extra_indices=torch.tensor([[[1, 5, 0]]]),
        extra_topk_length=torch.tensor([2]),
        head_dim_v=8,
    )
    for result, wanted in zip(joined, expected, strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("cache_format", ["v32", "model1"])
def test_the_one_byte_dtypes_are_the_same_cache(cache_format, dtype):
    inputs = small(cache_format=cache_format, head_dim=None, extra_topk=3, extra_s_k=5)
    expected = sparse_decode(**inputs)
    inputs["k_cache"] = inputs["k_cache"].view(dtype)
    inputs["cache_format"] = None
    for result, wanted in zip(sparse_decode(**inputs), expected, strict=True):
        assert result.equal(wanted)


def test_a_cache_may_come_without_its_heads_axis():
    inputs = small(cache_format="v32", head_dim=None)
    expected = sparse_decode(**inputs)[0]
    assert sparse_decode(**(inputs | {"k_cache": inputs["k_cache"].squeeze(2)}))[0].equal(expected)


def test_a_new_lse_has_flash_mlas_strides():
    out, lse = sparse_decode(**small())
    assert out.shape == (2, 3, 4, 16)
    assert out.is_contiguous()
    assert lse.shape == (2, 4, 3)
    assert lse.stride() == (12, 1, 4)


def test_outputs_given_are_written_and_returned():
    inputs = small()
    expected_out, expected_lse = sparse_decode(**inputs)
    out = torch.full((2, 3, 4, 20), torch.nan)[..., :16]
    lse = torch.full((3, 4, 2), torch.nan).permute(2, 1, 0)
    returned = sparse_decode(**inputs, out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    assert out.equal(expected_out)
    assert lse.equal(expected_lse)


def test_dequantized_rows_and_the_quantized_cache_give_equal_results():
    inputs = small(cache_format="v32", head_dim=None)
    rows = kv_cache.unpack(inputs["k_cache"], "v32", dtype=torch.float32)
    unquantized = sparse_decode(**(inputs | {"k_cache": rows, "cache_format": "fp32"}))
    for result, expected in zip(sparse_decode(**inputs), unquantized, strict=True):
        assert result.equal(expected)


def test_a_second_run_is_bitwise_the_same_and_a_request_does_not_depend_on_its_batch():
    inputs = small(
        cache_format="model1", head_dim=None, head_dim_v=512, topk_lengths="token", extra_topk=3, extra_s_k=9
    )
    out, lse = sparse_decode(**inputs)
    for first, second in zip(sparse_decode(**inputs), (out, lse), strict=True):
        assert first.equal(second)
    for request in range(2):
        one = slice(request, request + 1)
        alone = {name: inputs[name][one] for name in ("q", "indices", "topk_length", "extra_indices")}
        alone_out, alone_lse = sparse_decode(**(inputs | alone))
        assert alone_out.equal(out[one])
        assert alone_lse.equal(lse[one])
