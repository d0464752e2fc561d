"""The Triton merge against the reference, in Triton's interpreter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.allocations import recorded_bytes

from flashlatte.ops.merge_states import merge_states, portable
from flashlatte.ops.merge_states.reference import MergeStatesParams

pytestmark = pytest.mark.interpreter

FLOAT_DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
ULPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def assert_same(actual, expected):
    out, lse = actual
    assert out.dtype == expected[0].dtype
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-6)
    tolerance = ULPS[out.dtype]
    torch.testing.assert_close(out.float(), expected[0].float(), rtol=tolerance, atol=tolerance)


def laid_out(tensor, order, gap):
    """The values of ``tensor`` with its axes in memory in ``order``, and ``gap`` elements between rows."""
    widened = tensor.permute(order)
    storage = torch.full((*widened.shape[:-1], widened.shape[-1] + gap), torch.nan, dtype=tensor.dtype)
    storage[..., : widened.shape[-1]] = widened
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return storage[..., : widened.shape[-1]].permute(inverse)


def draw_parts(n, shape, dtype, seed, empty=0.3):
    """Parts of which a fraction is empty, with an infinite lse of either sign and NaN in out."""
    outs = torch.randn(n, *shape, generator=generator(seed)).to(dtype)
    lses = torch.randn(n, *shape[:-1], generator=generator(seed + 1)) * 4
    draw = torch.rand(lses.shape, generator=generator(seed + 2))
    lses[draw < empty] = -torch.inf
    lses[draw < empty / 2] = torch.inf
    outs[draw < empty] = torch.nan
    return list(outs), list(lses)


@pytest.mark.full
@given(
    n=st.integers(1, 5),
    axes=st.lists(st.integers(1, 5), max_size=4),
    d=st.sampled_from([1, 3, 32, 48]),
    order_seed=st.integers(0, 1000),
    gap=st.sampled_from([0, 1, 8]),
    dtype=FLOAT_DTYPES,
    seed=st.integers(0, 2**32),
)
def test_parts_of_any_strides(n, axes, d, order_seed, gap, dtype, seed):
    outs, lses = draw_parts(n, (*axes, d), dtype, seed)
    order = torch.randperm(len(axes) + 1, generator=generator(order_seed)).tolist()
    lse_order = torch.randperm(len(axes), generator=generator(order_seed)).tolist()
    strided_outs = [laid_out(part, order if i % 2 else sorted(order), gap) for i, part in enumerate(outs)]
    strided_lses = [laid_out(part, lse_order, gap) if axes and i % 2 else part for i, part in enumerate(lses)]
    out = laid_out(torch.zeros_like(outs[0]), order, gap)
    lse = laid_out(lses[0], lse_order, gap) if axes else torch.empty(())

    result = merge_states(strided_outs, strided_lses, out=out, lse=lse, backend="portable")
    assert result[0] is out
    assert result[1] is lse
    assert_same(result, merge_states(outs, lses, backend="reference"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_part_is_copied(dtype):
    outs, lses = draw_parts(1, (5, 3, 16), dtype, seed=0)
    out, lse = merge_states(outs, lses, backend="portable")
    empty = lses[0].isinf()
    assert empty.any()
    assert not empty.all()
    assert torch.equal(out, outs[0].masked_fill(empty.unsqueeze(-1), 0.0))
    assert torch.equal(lse, lses[0].masked_fill(empty, -torch.inf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [9, 16, *(pytest.param(n, marks=pytest.mark.full) for n in (8, 15, 40))])
def test_many_parts(n, dtype):
    outs, lses = draw_parts(n, (5, 3, 16), dtype, n)
    expected = merge_states(outs, lses, backend="reference")
    assert_same(merge_states(outs, lses, backend="portable"), expected)
    stacked = merge_states(torch.stack(outs), torch.stack(lses), backend="portable")
    assert_same(stacked, expected)


def test_scratch_for_many_parts_is_bounded(monkeypatch):
    monkeypatch.setattr(portable, "SCRATCH_BYTES", 4 * 18 * 6)
    outs, lses = draw_parts(11, (7, 5, 16), torch.bfloat16, 0)
    out, lse = torch.empty(7, 5, 16, dtype=torch.bfloat16), torch.empty(7, 5)
    sizes = recorded_bytes(monkeypatch)
    portable.merge_states_into(MergeStatesParams(outs, lses, out, lse, None, None, None, 1.0))
    assert sizes
    # Of what is merged so far: out, lse and row_sum.
    assert max(map(sum, zip(*[iter(sizes)] * 3, strict=True))) <= 4 * 18 * 6
    assert_same((out, lse), merge_states(outs, lses, backend="reference"))


def test_where_every_part_is_empty():
    outs = [torch.full((3, 8), torch.nan) for _ in range(3)]
    lses = [torch.full((3,), sign * torch.inf) for sign in (1, -1, 1)]
    out, lse = merge_states(outs, lses, backend="portable")
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


def test_nan_of_a_part_with_keys_is_kept():
    outs, lses = draw_parts(3, (4, 8), torch.float32, 0, empty=0.0)
    outs[1][2, 3] = torch.nan
    lses[2][0] = torch.nan
    out, lse = merge_states(outs, lses, backend="portable")
    expected_out, expected_lse = merge_states(outs, lses, backend="reference")
    torch.testing.assert_close(out, expected_out, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, equal_nan=True)


def test_lse_far_from_zero():
    outs, _ = draw_parts(2, (4, 8), torch.float32, 0, empty=0.0)
    lses = [torch.tensor([3e38, -3e38, 1e5, -200.0]), torch.tensor([1.0, -3e38, 1e5, -100.0])]
    exact_lses = torch.stack(lses).double()
    weights = exact_lses.softmax(dim=0).unsqueeze(-1)
    expected = (weights * torch.stack(outs)).sum(dim=0).float(), exact_lses.logsumexp(dim=0).float()
    assert_same(merge_states(outs, lses, backend="portable"), expected)


@pytest.mark.parametrize("n", [17, *(pytest.param(n, marks=pytest.mark.full) for n in (8, 9, 40))])
def test_many_parts_are_as_exact_with_a_large_lse(n):
    """More parts than one launch supports: intermediate results must not be rounded relative to their lse."""
    outs, lses = draw_parts(n, (3, 33), torch.float32, n, empty=0.0)
    lses = [lse + 5000 for lse in lses]
    exact_lses = torch.stack(lses).double()
    expected = (exact_lses.softmax(dim=0).unsqueeze(-1) * torch.stack(outs)).sum(dim=0)
    out, lse = merge_states(outs, lses, backend="portable")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), exact_lses.logsumexp(dim=0), rtol=2**-23, atol=0)


@pytest.mark.parametrize("n", [2, 10])
def test_in_place(n):
    outs, lses = draw_parts(n, (3, 5, 32), torch.bfloat16, 0)
    expected = merge_states(outs, lses, backend="reference")
    result = merge_states(outs, lses, out=outs[n - 1], lse=lses[n - 1], backend="portable")
    assert_same(result, expected)


def test_rows_wider_than_a_tile():
    outs, lses = draw_parts(2, (3, 2500), torch.bfloat16, 0)
    assert_same(merge_states(outs, lses, backend="portable"), merge_states(outs, lses, backend="reference"))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (8,)])
def test_sizes_at_the_edge(shape):
    outs, lses = draw_parts(2, shape, torch.float32, 0, empty=0.0)
    assert_same(merge_states(outs, lses, backend="portable"), merge_states(outs, lses, backend="reference"))


def test_rows_shared_by_a_broadcast():
    outs, lses = draw_parts(2, (4, 1, 8), torch.float32, 0)
    outs, lses = [part.expand(4, 3, 8) for part in outs], [part.expand(4, 3) for part in lses]
    assert_same(merge_states(outs, lses, backend="portable"), merge_states(outs, lses, backend="reference"))
