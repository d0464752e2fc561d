# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.indexer_loss_calls import LEAVES, arguments, with_gradients
from support.torch_op import assert_compiles, opcheck

from flashlatte.ops.indexer_loss import api, indexer_loss, reference
from flashlatte.testing import oracles
from flashlatte.testing.cases import SparsePrefillCase


def attention_lse(given):
    """lse of the attention over the visible keys of each query, [s_q, h_q]."""
    q, kv = given["q"].double(), given["kv"][:, 0].double()
    position = torch.arange(kv.shape[0])
    if given.get("indices") is None:
        seen = (position >= given["key_start"][:, None]) & (position < given["key_end"][:, None])
        counts = seen.long()
    else:
        chosen = given["indices"][:, 0].long()
        if given["topk_length"] is not None:
            chosen = chosen.masked_fill(torch.arange(chosen.shape[1]) >= given["topk_length"][:, None], -1)
        counts = (chosen.unsqueeze(-1) == position).sum(dim=1)
    scores = torch.einsum("shd,nd->shn", q, kv.nan_to_num()) * given["softmax_scale"]
    # A token that is selected twice is included twice.
    scores = torch.where(counts[:, None] > 0, scores + counts[:, None].clamp_min(1).log(), -torch.inf)
    return scores.logsumexp(dim=-1).float()


CASES = st.builds(
    SparsePrefillCase,
    s_q=st.integers(1, 9),
    s_kv=st.integers(1, 30),
    h_q=st.integers(1, 5),
    topk=st.integers(1, 40),
    head_dim=st.just(8),
    d_v=st.just(6),
    topk_lengths=st.booleans(),
    duplicates=st.booleans(),
    invalid_share=st.sampled_from([0.0, 0.3]),
    empty_rows=st.sampled_from([0.0, 0.5, 1.0]),
    softmax_scale=st.sampled_from([0.5, 30.0]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.just(torch.float32),
    seed=st.integers(0, 2**31),
)


@given(
    case=CASES,
    dense=st.booleans(),
    use_relu=st.booleans(),
    with_lse=st.booleans(),
    block=st.sampled_from([1, 10**4, 2**26]),
)
def test_float32_against_the_oracle(case, dense, use_relu, with_lse, block):
    given = arguments(case, dense) | {"use_relu": use_relu}
    lse = {"lse": attention_lse(given)} if with_lse else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "BLOCK_BYTES", block)
        results = with_gradients(indexer_loss, given | lse)
    expected = with_gradients(oracles.indexer_loss, given)
    assert results[1] == expected[1]
    for result, wanted in zip((results[0], *results[2:]), (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(result.double(), wanted.double(), rtol=2e-5, atol=2e-5)


TOY = SparsePrefillCase(5, 12, 3, 7, head_dim=8, d_v=6, dtype=torch.float32, topk_lengths=True)


@pytest.mark.parametrize("dense", [False, True])
def test_gradcheck(dense):
    given = arguments(TOY, dense, dtype=torch.float64)
    given = {name: x.nan_to_num(nan=0.1) if name in (*LEAVES, "q", "kv") else x for name, x in given.items()}
    leaves = [given.pop(name).requires_grad_() for name in LEAVES]
    assert torch.autograd.gradcheck(lambda *x: indexer_loss(*x, **given)[0], leaves)


@pytest.mark.parametrize("dense", [False, True])
def test_the_loss_without_gradients_is_the_same(dense):
    given = arguments(TOY, dense)
    loss, num_rows = indexer_loss(**given)
    assert not loss.requires_grad
    results = with_gradients(indexer_loss, given)
    assert (loss, num_rows) == results[:2]


def test_the_gradient_of_the_loss_is_not_rounded():
    """In bf16 it would be rounded to 1."""
    given = arguments(replace(TOY, dtype=torch.bfloat16), False, weights_dtype=torch.float32)
    given["index_weights"].requires_grad_()
    loss, _ = indexer_loss(**given)
    once, scaled = (torch.autograd.grad(loss * by, given["index_weights"], retain_graph=True)[0] for by in (1, 1.001))
    torch.testing.assert_close(scaled, once * 1.001)
    assert not scaled.equal(once)


def test_the_gradient_is_not_differentiated_again():
    given = arguments(TOY, False)
    given["index_weights"].requires_grad_()
    loss, _ = indexer_loss(**given)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, given["index_weights"], create_graph=True)


def test_no_loss_where_the_prediction_is_the_target():
    """With one head each, and the same rows and scales."""
    q, kv = torch.randn(4, 1, 8), torch.randn(9, 1, 8)
    options = {"softmax_scale": 0.7, "index_scale": 0.7, "use_relu": False}
    ranges = {"key_start": torch.zeros(4, dtype=torch.int32), "key_end": torch.arange(1, 5, dtype=torch.int32)}
    loss, num_rows = indexer_loss(q, kv[:, 0], torch.ones(4, 1), q, kv, **options, **ranges)
    torch.testing.assert_close(loss, torch.tensor(0.0), rtol=0, atol=1e-5)
    assert num_rows == 4


@pytest.mark.parametrize("s_kv", [0, 9])
@pytest.mark.parametrize("dense", [False, True])
def test_no_queries(dense, s_kv):
    none = torch.zeros(0, dtype=torch.int32)
    seen = {"key_start": none, "key_end": none} if dense else {"indices": none.view(0, 1, 0), "topk_length": none}
    index_q, index_k, weights = leaves = [
        torch.ones(shape).requires_grad_() for shape in ((0, 3, 8), (s_kv, 8), (0, 3))
    ]
    loss, num_rows = indexer_loss(index_q, index_k, weights, torch.ones(0, 4, 12), torch.ones(s_kv, 1, 12), **seen)
    assert (loss, num_rows) == (0, 0)
    for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        assert gradient.equal(torch.zeros_like(leaf))


@pytest.mark.parametrize("dense", [False, True])
def test_opcheck(dense):
    given = arguments(TOY, dense)
    for name in LEAVES:
        given[name].requires_grad_()
    opcheck(api, "indexer_loss", lambda: indexer_loss(**given))


def test_opcheck_of_the_backward_pass():
    given = arguments(TOY, False)
    given["index_weights"].requires_grad_()
    loss, _ = indexer_loss(**given)
    with mock.patch.object(api, "_indexer_loss_backward", wraps=api._indexer_loss_backward) as operation:
        torch.autograd.grad(loss, given["index_weights"])
    torch.library.opcheck(torch.ops.flashlatte.indexer_loss_backward.default, operation.call_args.args)


def test_compile():
    assert_compiles(indexer_loss, arguments(TOY, False), arguments(TOY, True))


VALID = arguments(TOY, False)
RANGES = {"key_start": torch.zeros(5, dtype=torch.int32), "key_end": torch.ones(5, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"index_q": VALID["index_q"].half()}, TypeError, "^index_k must be float16, got float32$"),
        ({"index_k": VALID["index_k"][:5]}, ValueError, r"^kv must have shape \[5, 1, 8\]"),
        ({"index_weights": VALID["index_weights"][:2]}, ValueError, r"^index_weights must have shape \[5, 3\]"),
        ({"q": VALID["q"][:2]}, ValueError, r"^q must have shape \[5, h_q, d\]"),
        ({"indices": None}, ValueError, "^key_start and key_end must be given without indices"),
        ({"indices": None, **RANGES}, ValueError, "topk_length only with indices$"),
        (RANGES, ValueError, "^key_start and key_end must be None with indices$"),
        ({"lse": torch.zeros(5, 2)}, ValueError, r"^lse must have shape \[5, 3\]"),
        ({"lse": torch.zeros(5, 3).double()}, TypeError, "^lse must be float32, got float64$"),
        ({"deterministic": 0}, TypeError, "^deterministic must be True or False, got 0$"),
        ({"backend": "hopper"}, ValueError, "takes bfloat16, float16, not float32$"),
        ({"backend": "portable"}, ValueError, "takes bfloat16, float16, not float32$"),
        ({"index_scale": 0.0}, ValueError, "^index_scale must be a finite number above 0, got 0.0$"),
        ({"group": "ranks"}, TypeError, "^group must be a process group that this rank is in, or None, got 'ranks'$"),
        ({"use_relu": 1}, TypeError, "^use_relu must be True or False, got 1$"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        indexer_loss(**(VALID | change))
