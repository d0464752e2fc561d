# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false, reportCallIssue=false

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import dense_prefill, merge_states
from flashlatte.ops.dense_prefill import reference
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import DensePrefillCase
from flashlatte.testing.compare import assert_accurate, assert_close

INF = math.inf
ROWS = ("q", "k", "v")


def small_case(dims, heads, **fields):
    return DensePrefillCase(
        h_q=heads[0], h_kv=heads[1], head_dim=dims[0], d_v=dims[1], dtype=torch.float32, varlen=True, **fields
    )


CASES = st.builds(
    small_case,
    batch=st.integers(1, 4),
    s_q=st.integers(1, 12),
    s_k=st.integers(1, 12),
    dims=st.sampled_from([(12, 8), (7, 7), (5, 6)]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 4, (0, 0), (2, -1), (-1, 3), (3, 2), (-1, -1)]),
    zero_lengths=st.booleans(),
    unowned=st.integers(0, 2),
    strided=st.booleans(),
    softmax_scale=st.sampled_from([0.01, 0.5, 3.0]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
SMALL = small_case((12, 8), (4, 2), batch=3, s_q=6, s_k=9)


def with_gradients(function, arguments, dout, dlse, **more):
    """(out, lse, dq, dk, dv) for gradients of out, and of the lse of rows with visible keys."""
    rows = {name: arguments[name].detach().clone().requires_grad_() for name in ROWS}
    out, lse = function(**(arguments | rows), **more)
    lse_in_use = torch.where(lse.isinf(), 0.0, lse)
    loss = (out * dout.to(out.dtype)).sum() + (lse_in_use * dlse.to(lse.dtype)).sum()
    if not loss.requires_grad:
        # Without queries the oracle reads nothing.
        return out.detach(), lse.detach(), *map(torch.zeros_like, rows.values())
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, list(rows.values()))


def gradients_of(arguments):
    generator = torch.Generator().manual_seed(1)
    shape = (*arguments["q"].shape[:2], arguments["v"].shape[2])
    return torch.randn(shape, generator=generator), torch.randn(shape[:2], generator=generator)


@given(case=CASES, empty_lse=st.sampled_from([INF, -INF]))
def test_float32_against_the_oracle(case, empty_lse):
    inputs = case.inputs()
    dout, dlse = gradients_of(inputs)
    results = with_gradients(dense_prefill, inputs, dout, dlse, empty_lse=empty_lse, backend="reference")
    expected = with_gradients(oracles.dense_prefill, inputs, dout, dlse, empty_lse=empty_lse)
    for name, result, oracle in zip(("out", "lse", "dq", "dk", "dv"), results, expected, strict=True):
        assert_close(result, oracle, replace(compare.FLOAT32, abs=1e-5), name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_against_the_oracle(dtype):
    inputs = DensePrefillCase(2, 20, 30, 2, 1, causal=True, varlen=True, strided=True, dtype=dtype).inputs()
    out, lse = dense_prefill(**inputs, backend="reference")
    expected_out, expected_lse = oracles.dense_prefill(**inputs)
    baseline, _ = oracles.dense_prefill(**inputs, dtype=torch.bfloat16)
    assert out.dtype == dtype
    assert_accurate(out, expected_out, baseline, "out")
    assert_close(lse, expected_lse, compare.DENSE_PREFILL_LSE, "lse")


@pytest.mark.parametrize(
    "more",
    [
        {"causal": True, "window": (2, 2)},
        *(
            pytest.param(more, marks=pytest.mark.full)
            for more in ({}, {"causal": True}, {"window": 3}, {"window": (1, 2)})
        ),
    ],
    ids=str,
)
def test_gradients_in_float64(more):
    case = DensePrefillCase(3, 4, 5, 4, 2, head_dim=5, d_v=3, varlen=True, zero_lengths=True, dtype=torch.float64)
    arguments = case.inputs() | more

    def attend(*rows):
        out, lse = dense_prefill(**(arguments | dict(zip(ROWS, rows, strict=True))))
        return out, torch.where(lse.isinf(), 0.0, lse)

    assert torch.autograd.gradcheck(attend, [arguments[name].requires_grad_() for name in ROWS])


def test_rows_without_keys():
    inputs = replace(SMALL, s_q=9, s_k=4, batch=1, varlen=False, causal=True).inputs()
    dout, dlse = gradients_of(inputs)
    for empty_lse in (INF, -INF):
        out, lse, dq, _, _ = with_gradients(dense_prefill, inputs, dout, dlse, empty_lse=empty_lse)
        assert out[:5].eq(0).all()
        assert lse[:5].eq(empty_lse).all()
        assert dq[:5].eq(0).all()
        assert lse[5:].isfinite().all()


@pytest.mark.parametrize("dlse", [torch.nan, INF])
def test_any_gradient_of_the_lse_of_a_row_without_keys_is_no_gradient(dlse):
    inputs = replace(SMALL, s_q=9, s_k=4, batch=1, varlen=False, causal=True).inputs()
    rows = [inputs[name].requires_grad_() for name in ROWS]
    _, lse = dense_prefill(**inputs)
    gradients = torch.autograd.grad(lse, rows, torch.where(lse.isinf(), dlse, 1.0))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_no_tokens_at_all():
    cu_seqlens = torch.zeros(3, dtype=torch.int32)
    q, k, v = (torch.zeros(0, 2, width, requires_grad=True) for width in (6, 6, 4))
    out, lse = dense_prefill(q, k, v, cu_seqlens, cu_seqlens, 0, 0)
    assert (out.shape, lse.shape) == ((0, 2, 4), (0, 2))
    out.sum().backward()
    q = torch.randn(3, 2, 6)
    out, lse = dense_prefill(q, k.detach(), v.detach(), torch.tensor([0, 1, 3]), cu_seqlens.long(), 2, 0)
    assert out.eq(0).all()
    assert lse.isneginf().all()


def test_a_window_of_one_gives_the_value_at_the_own_position():
    inputs = replace(SMALL, h_kv=4, equal=True).inputs()
    out, _ = dense_prefill(**(inputs | {"window": 1}))
    torch.testing.assert_close(out, inputs["v"])


def test_unlimited_windows_are_none():
    inputs = replace(SMALL, causal=True).inputs()
    expected = dense_prefill(**inputs)
    for window in ((-1, -1), (-1, 5), (10**12, 0), 10**12):
        for result, wanted in zip(dense_prefill(**(inputs | {"window": window})), expected, strict=True):
            assert result.equal(wanted)


def test_nan_in_tokens_of_no_request_stays_there():
    inputs = replace(SMALL, unowned=3, strided=True).inputs()
    results = with_gradients(dense_prefill, inputs, *gradients_of(inputs))
    assert inputs["q"].isnan().any()
    assert not any(result.isnan().any() for result in results)
    for result in results:
        assert result[:3].masked_fill(result[:3].isneginf(), 0).eq(0).all()


def test_gradients_without_that_of_out_or_of_lse():
    inputs = SMALL.inputs()
    dout, dlse = gradients_of(inputs)
    both = with_gradients(dense_prefill, inputs, dout, dlse)[2:]
    rows = [inputs[name].requires_grad_() for name in ROWS]
    out, lse = dense_prefill(**inputs)
    of_out = torch.autograd.grad(out, rows, dout, retain_graph=True)
    of_lse = torch.autograd.grad(lse, rows, dlse)
    for whole, first, second in zip(both, of_out, of_lse, strict=True):
        torch.testing.assert_close(whole, first + second)
    assert of_lse[2].eq(0).all()


def test_a_prefix_and_the_new_tokens_merge_into_the_whole():
    """Chunked prefill: two calls over parts of the keys, values and gradients."""
    generator = torch.Generator().manual_seed(0)
    prefixes, news = [5, 0, 3], [4, 2, 6]
    q, k, v = (torch.randn(n, h, d, generator=generator, dtype=torch.float64, requires_grad=True)
               for n, h, d in ((sum(news), 4, 6), (20, 2, 6), (20, 2, 5)))  # fmt: skip

    def boundaries(lengths):
        return torch.tensor([0, *lengths]).cumsum(0)

    whole = [prefix + new for prefix, new in zip(prefixes, news, strict=True)]
    first = torch.cat(
        [torch.arange(prefix) + begin for prefix, begin in zip(prefixes, boundaries(whole), strict=False)]
    )
    second = torch.tensor([i for i in range(20) if i not in first.tolist()])
    queries = boundaries(news)
    old_out, old_lse = dense_prefill(q, k[first], v[first], queries, boundaries(prefixes), 6, 5)
    new_out, new_lse = dense_prefill(q, k[second], v[second], queries, queries, 6, 6, causal=True)
    parts = [old_out.float(), new_out.float()], [old_lse.float(), new_lse.float()]
    merged = merge_states(*parts)
    expected = dense_prefill(q, k, v, queries, boundaries(whole), 6, 9, causal=True)
    for result, wanted in zip(merged, expected, strict=True):
        torch.testing.assert_close(result, wanted.float())
    weights = torch.randn(merged[0].shape, generator=generator), torch.randn(merged[1].shape, generator=generator)
    actual, wanted = (
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(results, weights, strict=True)), (q, k, v))
        for results in (merged, expected)
    )
    for gradient, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


def test_the_result_does_not_depend_on_how_many_rows_are_taken_at_a_time(monkeypatch):
    inputs = replace(SMALL, causal=True).inputs()
    whole = with_gradients(dense_prefill, inputs, *gradients_of(inputs))
    monkeypatch.setattr(reference, "SCORE_BYTES", 4 * 4 * 9 * 2)
    for result, expected in zip(with_gradients(dense_prefill, inputs, *gradients_of(inputs)), whole, strict=True):
        torch.testing.assert_close(result, expected)


def test_out_is_written_if_given_and_lse_lies_by_heads():
    inputs = SMALL.inputs()
    expected_out, expected_lse = dense_prefill(**inputs)
    tokens = inputs["q"].shape[0]
    assert expected_out.is_contiguous()
    assert expected_lse.stride() == (1, tokens)
    out = torch.full((tokens, 5, 10), torch.nan)[:, :4, :8]
    results = dense_prefill(**inputs, out=out)
    assert results[0] is out
    assert out.equal(expected_out)
    assert results[1].equal(expected_lse)
    assert results[1].stride() == (1, tokens)


def test_a_second_run_is_bitwise_the_same():
    inputs = SMALL.inputs()
    first, second = (with_gradients(dense_prefill, inputs, *gradients_of(inputs), deterministic=True) for _ in "12")
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))
