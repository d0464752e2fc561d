# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import dense_decode
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import DenseDecodeCase
from flashlatte.testing.compare import assert_accurate, assert_close

INF = math.inf
FIRST_BEYOND = None


def small_case(group, h_kv, dims, page_size, **fields):
    head_dim, head_dim_v = dims
    return DenseDecodeCase(
        h_q=group * h_kv, h_kv=h_kv, head_dim=head_dim, head_dim_v=head_dim_v, page_size=page_size, **fields
    )


CASES = st.builds(
    small_case,
    batch=st.integers(1, 4),
    s_q=st.integers(1, 5),
    s_k=st.integers(1, 30),
    group=st.integers(1, 5),
    h_kv=st.integers(1, 3),
    dims=st.sampled_from([(24, 16), (7, 7), (5, 1)]),
    page_size=st.integers(1, 9),
    varlen=st.booleans(),
    causal=st.booleans(),
    zero_lengths=st.booleans(),
    strided=st.booleans(),
    separate_rope=st.booleans(),
    softmax_scale=st.sampled_from([None, 0.01, 3.0]),
    dtype=st.just(torch.float32),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)


@given(case=CASES, empty_lse=st.sampled_from([INF, -INF]))
def test_float32_against_the_oracle(case, empty_lse):
    inputs = case.inputs()
    out, lse = dense_decode(**inputs, empty_lse=empty_lse, backend="reference")
    expected_out, expected_lse = oracles.dense_decode(**inputs, empty_lse=empty_lse)
    assert_close(out, expected_out, compare.FLOAT32, "out")
    assert_close(lse, expected_lse, compare.FLOAT32, "lse")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [576, 512])
def test_half_precision_against_the_oracle(dtype, cache_dtype, head_dim):
    case = DenseDecodeCase(
        3, 3, 90, 6, h_kv=2, head_dim=head_dim, varlen=True, causal=True, dtype=dtype, cache_dtype=cache_dtype
    )
    inputs = case.inputs()
    out, lse = dense_decode(**inputs, backend="reference")
    expected_out, expected_lse = oracles.dense_decode(**inputs)
    baseline_out, _ = oracles.dense_decode(**inputs, dtype=torch.bfloat16)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_accurate(out, expected_out, baseline_out, "out")
    assert_close(out, expected_out, compare.DENSE_DECODE_OUT, "out")
    assert_close(lse, expected_lse, compare.DECODE_LSE, "lse")


def two_requests(**fields):
    return DenseDecodeCase(
        2, 3, 20, 4, h_kv=2, head_dim=24, head_dim_v=16, page_size=7, dtype=torch.float32, **fields
    ).inputs()


def test_one_key_gives_its_value_and_its_score():
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(3, 4, 1, 8)
    out, lse = dense_decode(q, cache, torch.tensor([[2]]), torch.tensor([1]), head_dim_v=5, softmax_scale=0.5)
    torch.testing.assert_close(out, cache[2, 0, 0, :5].expand(1, 1, 2, 5))
    torch.testing.assert_close(lse, (q[0, 0] @ cache[2, 0, 0] * 0.5).reshape(1, 2, 1))


def test_the_default_scale_is_of_the_whole_head_dim():
    inputs = two_requests()
    expected = dense_decode(**(inputs | {"softmax_scale": 24**-0.5}))[0]
    assert dense_decode(**inputs)[0].equal(expected)


def test_causal_is_aligned_at_the_bottom_right():
    inputs = two_requests(causal=True) | {"cache_seqlens": torch.tensor([2, 9])}
    out, lse = dense_decode(**inputs, empty_lse=INF)
    assert lse[0, :, 0].isposinf().all()
    assert out[0, 0].eq(0).all()
    for request, token, keys in ((0, 1, 1), (0, 2, 2), (1, 0, 7), (1, 1, 8), (1, 2, 9)):
        lengths = inputs["cache_seqlens"].clone()
        lengths[request] = keys
        whole, whole_lse = dense_decode(**(inputs | {"causal": False, "cache_seqlens": lengths}))
        torch.testing.assert_close(out[request, token], whole[request, token])
        torch.testing.assert_close(lse[request, :, token], whole_lse[request, :, token])


@pytest.mark.parametrize("page", [-1, FIRST_BEYOND, 10**6, 2_147_480_000, -(2**31)])
def test_a_page_that_does_not_exist_hides_its_keys(page):
    inputs = two_requests()
    table = inputs["block_table"].clone()
    table[0, 1] = inputs["k_cache"].shape[0] if page is FIRST_BEYOND else page
    actual = dense_decode(**(inputs | {"block_table": table}))
    expected = oracles.dense_decode(**(inputs | {"block_table": table}))
    for result, oracle in zip(actual, expected, strict=True):
        assert_close(result, oracle, compare.FLOAT32)
    assert not actual[0][0].equal(dense_decode(**inputs)[0][0])


@pytest.mark.parametrize("causal", [False, True])
def test_a_request_is_no_longer_than_its_table(causal):
    inputs = two_requests(causal=causal)
    narrow = inputs | {"block_table": inputs["block_table"][:, :2]}
    fourteen = inputs | {"cache_seqlens": torch.tensor([14, 14])}
    for result, expected in zip(dense_decode(**narrow), dense_decode(**fourteen), strict=True):
        assert result.equal(expected)


@pytest.mark.parametrize("length", [0, -1, -(2**31)])
def test_no_keys_give_zero_and_the_empty_lse(length):
    inputs = two_requests() | {"cache_seqlens": torch.tensor([20, length], dtype=torch.int32)}
    inputs["block_table"][1] = 2_147_480_000
    for empty_lse in (INF, -INF):
        out, lse = dense_decode(**inputs, empty_lse=empty_lse)
        assert out[1].eq(0).all()
        assert lse[1].eq(empty_lse).all()
        assert lse[0].isfinite().all()


def test_a_new_lse_has_flash_mlas_strides():
    out, lse = dense_decode(**two_requests())
    assert out.shape == (2, 3, 4, 16)
    assert out.is_contiguous()
    assert lse.shape == (2, 4, 3)
    assert lse.stride() == (12, 1, 4)


def test_outputs_given_are_written_and_returned():
    inputs = two_requests()
    expected_out, expected_lse = dense_decode(**inputs)
    out = torch.full((2, 3, 4, 20), torch.nan)[..., :16]
    lse = torch.full((3, 4, 2), torch.nan).permute(2, 1, 0)
    returned = dense_decode(**inputs, out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    assert out.equal(expected_out)
    assert lse.equal(expected_lse)


def test_k_scale_may_be_a_number_or_a_tensor():
    inputs = DenseDecodeCase(2, 1, 20, 4, cache_dtype=torch.float8_e4m3fn).inputs()
    expected = dense_decode(**inputs)
    for k_scale in (torch.tensor([0.02]), torch.tensor(0.02), torch.full((1, 1), 0.02)):
        for result, wanted in zip(dense_decode(**(inputs | {"k_scale": k_scale})), expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    unscaled = dense_decode(**(inputs | {"k_scale": None}))[0]
    one = dense_decode(**(inputs | {"k_scale": 1.0}))[0]
    assert unscaled.equal(one)
    assert not unscaled.equal(expected[0])


def test_large_scores_do_not_overflow():
    inputs = two_requests(softmax_scale=2000.0)
    out, lse = dense_decode(**inputs)
    expected_out, expected_lse = oracles.dense_decode(**inputs)
    assert_close(lse, expected_lse, compare.FLOAT32)
    assert_close(out, expected_out, compare.Tolerance(1e-3, 1e-3, 1e-5))


def test_a_second_run_is_bitwise_the_same():
    inputs = two_requests(causal=True)
    for first, second in zip(dense_decode(**inputs), dense_decode(**inputs), strict=True):
        assert first.equal(second)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_request_does_not_depend_on_its_batch(batch_invariant):
    case = DenseDecodeCase(
        4,
        2,
        40,
        3,
        head_dim=24,
        head_dim_v=16,
        page_size=7,
        varlen=True,
        zero_lengths=True,
        seed=3,
        dtype=torch.float32,
    )
    inputs = case.inputs() | {"batch_invariant": batch_invariant}
    out, lse = dense_decode(**inputs, backend="reference")
    for request in range(4):
        one = slice(request, request + 1)
        alone = {name: inputs[name][one] for name in ("q", "block_table", "cache_seqlens")}
        alone_out, alone_lse = dense_decode(**(inputs | alone), backend="reference")
        assert alone_out.equal(out[one])
        assert alone_lse.equal(lse[one])
