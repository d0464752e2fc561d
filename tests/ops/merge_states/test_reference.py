import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import dense_decode, merge_states
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import DenseDecodeCase
from flashlatte.testing.compare import assert_close, bf16_ulp

INF = math.inf


def draw_parts(n, shape, dtype=torch.float32, empty=0.3, size=4.0, seed=0):
    """Parts of which a fraction ``empty`` has no keys: an infinite lse of either sign and NaN in out."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(n, *shape, generator=generator).to(dtype)
    lses = torch.randn(n, *shape[:-1], generator=generator) * size
    draw = torch.rand(lses.shape, generator=generator)
    lses[draw < empty] = -INF
    lses[draw < empty / 2] = INF
    outs[draw < empty] = torch.nan
    return outs, lses


@given(
    n=st.integers(1, 5),
    axes=st.lists(st.integers(1, 4), max_size=3),
    width=st.integers(1, 9),
    empty=st.sampled_from([0.0, 0.5, 1.0]),
    size=st.sampled_from([1.0, 30.0, 1000.0]),
    stacked=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_float32_against_the_oracle(n, axes, width, empty, size, stacked, seed):
    outs, lses = draw_parts(n, (*axes, width), empty=empty, size=size, seed=seed)
    given_parts = (outs, lses) if stacked else (list(outs), tuple(lses))
    out, lse = merge_states(*given_parts, backend="reference")
    expected_out, expected_lse = oracles.merge_states(outs, lses)
    assert_close(out, expected_out, compare.Tolerance(1e-5, 2e-4, 1e-8), "out")
    assert_close(lse, expected_lse, compare.FLOAT32, "lse")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    outs, lses = draw_parts(3, (5, 4, 16), dtype)
    out, _ = merge_states(outs, lses)
    expected, _ = oracles.merge_states(outs, lses)
    assert out.dtype == dtype
    assert ((out.double() - expected).abs() <= bf16_ulp(expected) * 0.501 + 1e-6).all()


def test_where_every_part_is_empty_out_is_zero_and_lse_minus_inf():
    outs, lses = torch.full((2, 3, 8), torch.nan), torch.tensor([[INF, -INF, INF], [INF, -INF, -INF]])
    out, lse = merge_states(outs, lses)
    assert out.eq(0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("empty", [INF, -INF])
def test_an_empty_part_leaves_the_other_as_it_is(empty):
    outs, lses = draw_parts(2, (3, 8), empty=0.0)
    lses[1], outs[1] = empty, torch.nan
    out, lse = merge_states(outs, lses)
    assert out.equal(outs[0])
    assert lse.equal(lses[0])


def test_parts_over_disjoint_keys_give_attention_over_all_keys():
    case = DenseDecodeCase(2, 2, 40, 4, head_dim=24, head_dim_v=16, page_size=4, dtype=torch.float32)
    inputs = case.inputs()
    whole_out, whole_lse = dense_decode(**inputs)
    table, parts = inputs["block_table"], []
    for begin, end in ((0, 3), (3, 4), (4, 10)):
        lengths = torch.full((2,), 4 * (end - begin))
        parts.append(dense_decode(**(inputs | {"block_table": table[:, begin:end], "cache_seqlens": lengths})))
    out, lse = merge_states([part for part, _ in parts], [part_lse.transpose(1, 2) for _, part_lse in parts])
    torch.testing.assert_close(out, whole_out)
    torch.testing.assert_close(lse, whole_lse.transpose(1, 2))


def test_strided_parts_and_outputs():
    outs, lses = draw_parts(2, (3, 4, 8))
    expected_out, expected_lse = merge_states(outs, lses)
    strided_outs = [part.permute(2, 0, 1).contiguous().permute(1, 2, 0) for part in outs]
    out, lse = torch.full((8, 3, 4), torch.nan).permute(1, 2, 0), torch.full((4, 3), torch.nan).T
    results = merge_states(strided_outs, [part.T.contiguous().T for part in lses], out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    assert out.equal(expected_out)
    assert lse.equal(expected_lse)


def test_the_result_may_replace_a_part():
    outs, lses = draw_parts(2, (3, 4, 8))
    expected_out, expected_lse = merge_states(outs, lses)
    merge_states(outs, lses, out=outs[0], lse=lses[0])
    assert outs[0].equal(expected_out)
    assert lses[0].equal(expected_lse)


def test_no_rows_give_no_rows():
    out, lse = merge_states(torch.zeros(2, 0, 4, 8), torch.zeros(2, 0, 4))
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)


def test_gradients_flow_to_every_out_and_lse():
    outs, lses = draw_parts(3, (2, 4, 8), empty=0.0, size=1.0)
    outs.requires_grad_()
    lses.requires_grad_()
    exact_outs, exact_lses = outs.detach().double().requires_grad_(), lses.detach().double().requires_grad_()
    out, lse = merge_states(outs, lses)
    exact_lse = exact_lses.exp().sum(0).log()
    exact_out = ((exact_lses - exact_lse).exp().unsqueeze(-1) * exact_outs).sum(0)
    torch.testing.assert_close(out.detach().double(), exact_out.detach(), rtol=1e-5, atol=1e-6)

    out_weight, lse_weight = torch.randn(out.shape), torch.randn(lse.shape)
    ((out * out_weight).sum() + (lse * lse_weight).sum()).backward()
    ((exact_out * out_weight).sum() + (exact_lse * lse_weight).sum()).backward()
    for actual, exact in ((outs.grad, exact_outs.grad), (lses.grad, exact_lses.grad)):
        assert actual is not None
        assert exact is not None
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_gradients_of_empty_parts_are_zero():
    outs, lses = draw_parts(3, (4, 4, 8), empty=0.6)
    assert lses.isinf().all(dim=0).any()
    empty = lses.isinf()
    outs.requires_grad_()
    lses.requires_grad_()
    out, lse = merge_states(outs, lses)
    (out.sum() + lse.masked_fill(lse.isinf(), 0.0).sum()).backward()
    for gradient in (outs.grad, lses.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
        assert gradient[empty].eq(0).all()
        assert gradient[~empty].ne(0).any()


def test_a_second_run_is_bitwise_the_same():
    outs, lses = draw_parts(4, (3, 4, 8))
    for first, second in zip(merge_states(outs, lses), merge_states(outs, lses), strict=True):
        assert first.equal(second)
