# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gradient_calls import sparse_attention_gradients

from flashlatte import sparse_attention, sparse_prefill
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparsePrefillCase
from flashlatte.testing.compare import assert_accurate, assert_close

NAMES = ("out", "lse", "dq", "dkv", "d_sink")


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


@given(case=CASES, with_dlse=st.booleans())
def test_float32_against_the_oracle(case, with_dlse):
    """Rows of kv that no query selects are NaN, and so are queries that select nothing and the gradients of their
    results.
    """
    inputs = case.inputs()
    _, lse = sparse_attention(**inputs)
    inputs["q"][lse.isinf().all(dim=-1)] = torch.nan
    results = sparse_attention_gradients(sparse_attention, inputs, with_dlse, backend="reference")
    expected = sparse_attention_gradients(oracles.sparse_attention, inputs, with_dlse)
    for name, result, oracle in zip(NAMES[:2], results[:2], expected[:2], strict=True):
        assert_close(result, oracle, compare.FLOAT32, name)
    # Of one key dq is 0, and what is left of it in float32 has no direction to compare.
    for result, oracle in zip(results[2:], expected[2:], strict=True):
        torch.testing.assert_close(result.double(), oracle.double(), rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [576, 512])
def test_half_precision_against_the_oracle(dtype, head_dim):
    inputs = SparsePrefillCase(20, 95, 6, 64, head_dim=head_dim, topk_lengths=True, strided=True, dtype=dtype).inputs()
    results = sparse_attention_gradients(sparse_attention, inputs, with_dlse=False, backend="reference")
    expected = sparse_attention_gradients(oracles.sparse_attention, inputs, with_dlse=False)
    baseline = sparse_attention_gradients(oracles.sparse_attention, inputs, with_dlse=False, dtype=torch.bfloat16)
    for name, result, oracle, plain in zip(NAMES, results, expected, baseline, strict=True):
        if name != "lse":
            assert_accurate(result, oracle, plain, name)


@pytest.mark.parametrize("with_length", [False, True])
def test_gradcheck(with_length):
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (4, 3, 6), "kv": (9, 1, 6), "sink": (3,)}
    q, kv, sink = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes.values()
    )
    indices = torch.tensor([[0, 3, 3, 8], [7, -1, 2, 9], [-1, -1, 9, 40], [1, 2, 4, 5]])[:, None]
    lengths = torch.tensor([4, 3, 4, 2]) if with_length else None

    def call(q, kv, sink):
        out, lse = sparse_attention(q, kv, indices, topk_length=lengths, attn_sink=sink, d_v=4, backend="reference")
        return out, torch.where(lse.isinf(), 0.0, lse)

    assert torch.autograd.gradcheck(call, (q, kv, sink))


def test_forward_is_that_of_sparse_prefill():
    inputs = SparsePrefillCase(5, 30, 4, 9, head_dim=24, d_v=16, topk_lengths=True, empty_rows=0.3).inputs()
    scale = inputs.pop("softmax_scale")
    out, lse = sparse_attention(**inputs, softmax_scale=scale)
    expected, _, expected_lse = sparse_prefill(**inputs, softmax_scale=scale)
    assert out.equal(expected)
    assert lse.equal(expected_lse)


def test_a_token_selected_twice_has_twice_the_gradient():
    q, kv = torch.ones(1, 2, 8), torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out, _ = sparse_attention(q, kv, torch.tensor([[[1, 4, 1, 4]]]), d_v=8)
    (twice,) = torch.autograd.grad(out.sum(), kv)
    out, _ = sparse_attention(q, kv, torch.tensor([[[1, 4]]]), d_v=8)
    (once,) = torch.autograd.grad(out.sum(), kv)
    torch.testing.assert_close(twice, once)
    assert once[[0, 2, 3, 5]].eq(0).all()


def test_no_queries():
    q, kv = torch.zeros(0, 4, 16, requires_grad=True), torch.ones(9, 1, 16, requires_grad=True)
    sink = torch.zeros(4, requires_grad=True)
    out, lse = sparse_attention(q, kv, torch.zeros(0, 1, 5, dtype=torch.int32), attn_sink=sink, d_v=8)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)
    out.sum().backward()
    assert q.grad is not None
    assert all(x.grad is not None and x.grad.eq(0).all() for x in (kv, sink))
