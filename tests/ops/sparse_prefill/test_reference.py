# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import sparse_prefill
from flashlatte.ops.sparse_prefill import reference
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparsePrefillCase
from flashlatte.testing.compare import assert_accurate, assert_close
from flashlatte.testing.draws import BEYOND_INT32, INT32_LIMITS

INF = math.inf


def small_case(dims, **fields):
    head_dim, d_v = dims
    return SparsePrefillCase(head_dim=head_dim, d_v=d_v, dtype=torch.float32, **fields)


CASES = st.builds(
    small_case,
    s_q=st.integers(1, 9),
    s_kv=st.integers(1, 30),
    h_q=st.integers(1, 5),
    topk=st.integers(1, 40),
    dims=st.sampled_from([(24, 16), (7, 7), (5, 1)]),
    topk_lengths=st.booleans(),
    attn_sink=st.booleans(),
    duplicates=st.booleans(),
    invalid_share=st.sampled_from([0.0, 0.3]),
    empty_rows=st.sampled_from([0.0, 0.5, 1.0]),
    strided=st.booleans(),
    softmax_scale=st.sampled_from([0.01, 0.5, 3.0]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)


@given(case=CASES, empty_lse=st.sampled_from([INF, -INF]))
def test_float32_against_the_oracle(case, empty_lse):
    inputs = case.inputs()
    results = sparse_prefill(**inputs, empty_lse=empty_lse, backend="reference")
    expected = oracles.sparse_prefill(**inputs, empty_lse=empty_lse)
    for name, result, oracle in zip(("out", "max_logits", "lse"), results, expected, strict=True):
        assert_close(result, oracle, compare.FLOAT32, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [576, 512])
def test_half_precision_against_the_oracle(dtype, head_dim):
    inputs = SparsePrefillCase(20, 95, 6, 64, head_dim=head_dim, topk_lengths=True, strided=True, dtype=dtype).inputs()
    out, max_logits, lse = sparse_prefill(**inputs, backend="reference")
    expected_out, expected_max, expected_lse = oracles.sparse_prefill(**inputs)
    baseline_out, _, _ = oracles.sparse_prefill(**inputs, dtype=torch.bfloat16)
    assert out.dtype == dtype
    assert_accurate(out, expected_out, baseline_out, "out")
    assert_close(out, expected_out, compare.SPARSE_PREFILL_OUT, "out")
    assert_close(max_logits, expected_max, compare.SPARSE_PREFILL_LSE, "max_logits")
    assert_close(lse, expected_lse, compare.SPARSE_PREFILL_LSE, "lse")


def small(**fields):
    return SparsePrefillCase(5, 30, 4, 9, head_dim=24, d_v=16, dtype=torch.float32, **fields).inputs()


def test_one_key_gives_its_value_and_its_logit():
    q, kv = torch.randn(1, 2, 8), torch.randn(6, 1, 8)
    out, max_logits, lse = sparse_prefill(q, kv, torch.tensor([[[3]]]), 0.5, d_v=5)
    logits = (q[0] @ kv[3, 0] * 0.5).reshape(1, 2)
    torch.testing.assert_close(out, kv[3, :, :5].expand(1, 2, 5))
    torch.testing.assert_close(max_logits, logits)
    torch.testing.assert_close(lse, logits)


def test_the_default_scale_is_of_the_whole_head_dim():
    inputs = small()
    expected = sparse_prefill(**(inputs | {"softmax_scale": 24**-0.5}))
    assert sparse_prefill(**(inputs | {"softmax_scale": None}))[0].equal(expected[0])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_every_index_outside_kv_selects_nothing(index_dtype):
    q, kv = torch.ones(1, 2, 8), torch.randn(6, 1, 8)
    kv[0] = kv[5] = torch.nan
    outside = [-1, -6, 6, 7, *INT32_LIMITS, *(BEYOND_INT32 if index_dtype == torch.int64 else ())]
    mixed = sparse_prefill(q, kv, torch.tensor([[[*outside, 4]]], dtype=index_dtype), d_v=8)
    alone = sparse_prefill(q, kv, torch.tensor([[[4]]]), d_v=8)
    for result, expected in zip(mixed, alone, strict=True):
        torch.testing.assert_close(result, expected)


def test_a_token_selected_twice_counts_twice():
    q, kv = torch.ones(1, 2, 8), torch.randn(6, 1, 8)
    _, once_max, once = sparse_prefill(q, kv, torch.tensor([[[1]]]), d_v=8)
    _, twice_max, twice = sparse_prefill(q, kv, torch.tensor([[[1, 1]]]), d_v=8)
    torch.testing.assert_close(twice, once + math.log(2))
    assert twice_max.equal(once_max)


def test_nan_beyond_topk_length_and_in_unselected_tokens_stays_there():
    q, kv = torch.ones(2, 2, 8), torch.randn(6, 1, 8)
    kv[1] = torch.nan
    indices = torch.tensor([[[0, 3, 1, 5]], [[4, -1, 5, 1]]])
    for results in (
        sparse_prefill(q, kv, indices, d_v=8, topk_length=torch.tensor([2, 3])),
        sparse_prefill(q, kv, indices.masked_fill(indices == 1, -1), d_v=8),
    ):
        assert all(result.isfinite().all() for result in results)
    assert sparse_prefill(q, kv, indices, d_v=8)[2].isnan().all()


@pytest.mark.parametrize("length", [0, -3, -(2**31)])
def test_a_topk_length_of_nothing_empties_the_row(length):
    inputs = small(attn_sink=False) | {"topk_length": torch.tensor([9, length, 9, 9, 2**31 - 1], dtype=torch.int32)}
    for empty_lse in (INF, -INF):
        out, max_logits, lse = sparse_prefill(**inputs, empty_lse=empty_lse)
        assert out[1].eq(0).all()
        assert max_logits[1].isneginf().all()
        assert lse[1].eq(empty_lse).all()
        assert lse[[0, 2, 3, 4]].isfinite().all()


def test_the_sink_scales_out_and_leaves_lse_and_max_logits():
    inputs = small(attn_sink=False)
    plain_out, plain_max, plain_lse = sparse_prefill(**inputs)
    sink = torch.tensor([-INF, INF, 0.7, -2.0])
    out, max_logits, lse = sparse_prefill(**(inputs | {"attn_sink": sink}))
    assert lse.equal(plain_lse)
    assert max_logits.equal(plain_max)
    share = plain_lse.exp() / (plain_lse.exp() + sink.exp())
    share[:, 1] = 0.0
    torch.testing.assert_close(out, plain_out * share.unsqueeze(-1))
    assert out[:, 1].eq(0).all()


@pytest.mark.parametrize("sink", [-INF, INF, 3.0])
def test_a_row_that_selects_nothing_is_zero_whatever_the_sink(sink):
    out, max_logits, lse = sparse_prefill(**(small(empty_rows=1.0) | {"attn_sink": torch.full((4,), sink)}))
    assert out.eq(0).all()
    assert max_logits.isneginf().all()
    assert lse.isneginf().all()


def test_the_result_does_not_depend_on_how_many_tokens_are_taken_at_a_time(monkeypatch):
    inputs = small(topk_lengths=True, empty_rows=0.3)
    whole = sparse_prefill(**inputs)
    monkeypatch.setattr(reference, "GATHERED_BYTES", 2 * 9 * 24 * 4)
    for result, expected in zip(sparse_prefill(**inputs), whole, strict=True):
        assert result.equal(expected)


def test_more_than_65535_query_tokens():
    s_q = 70_000
    q, kv = torch.ones(s_q, 1, 4), torch.randn(3, 1, 4)
    indices = (torch.arange(s_q) % 3).reshape(s_q, 1, 1)
    out, _, _ = sparse_prefill(q, kv, indices, d_v=4)
    torch.testing.assert_close(out, kv[indices.flatten()])


def test_results_are_contiguous_and_out_is_written_if_given():
    inputs = small()
    expected = sparse_prefill(**inputs)
    assert all(result.is_contiguous() for result in expected)
    out = torch.full((5, 4, 20), torch.nan)[..., :16]
    results = sparse_prefill(**inputs, out=out)
    assert results[0] is out
    for result, wanted in zip(results, expected, strict=True):
        assert result.equal(wanted)


def test_a_second_run_is_bitwise_the_same_and_a_token_does_not_depend_on_the_others():
    inputs = small(topk_lengths=True)
    results = sparse_prefill(**inputs)
    for first, second in zip(sparse_prefill(**inputs), results, strict=True):
        assert first.equal(second)
    for token in range(5):
        one = slice(token, token + 1)
        alone = sparse_prefill(**(inputs | {name: inputs[name][one] for name in ("q", "indices", "topk_length")}))
        for result, whole in zip(alone, results, strict=True):
            assert result.equal(whole[one])
