# Keyword arguments are put together in dicts of mixed values.
# pyright: reportArgumentType=false

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import assert_compiles, opcheck

from flashlatte.ops.indexer_loss import api, indexer_loss, reference
from flashlatte.testing import oracles
from flashlatte.testing.cases import SparsePrefillCase
from flashlatte.testing.draws import Draw

LEAVES = ("index_q", "index_k", "index_weights")


def arguments(case, dense, h_i=3, index_dim=6, dtype=torch.float32):
    """Rows that no query sees are NaN, also of queries that see no key."""
    given = case.inputs()
    draw = Draw(case.seed + 1, "cpu")
    q, kv = given["q"].to(dtype), given["kv"].to(dtype)
    found = {
        "index_q": draw.normal(case.s_q, h_i, index_dim, dtype=dtype, factor=2.0),
        "index_k": draw.normal(case.s_kv, index_dim, dtype=dtype, factor=2.0),
        "index_weights": draw.normal(case.s_q, h_i, dtype=dtype, factor=2.0),
        "q": q,
        "kv": kv,
        "softmax_scale": case.softmax_scale,
    }
    if dense:
        kv.nan_to_num_(nan=0.1)
        start = draw.integers(-3, case.s_kv + 3, case.s_q)
        found |= {"key_start": start, "key_end": start + draw.integers(-3, case.s_kv, case.s_q)}
        first, end = (x.clamp(0, case.s_kv)[:, None] for x in (found["key_start"], found["key_end"]))
        position = torch.arange(case.s_kv)
        seen = (position >= first) & (position < end)
        unseen, empty = ~seen.any(dim=0), ~seen.any(dim=1)
        kv[unseen] = torch.nan
    else:
        found |= {"indices": given["indices"], "topk_length": given["topk_length"]}
        unseen = kv.isnan().any(dim=-1)[:, 0]
        valid = (given["indices"] >= 0) & (given["indices"] < case.s_kv)
        if given["topk_length"] is not None:
            valid &= torch.arange(case.topk) < given["topk_length"][:, None, None]
        empty = ~valid[:, 0].any(dim=-1)
    found["index_k"][unseen] = torch.nan
    found["q"] = torch.where(empty[:, None, None], torch.nan, q)
    found["index_q"][empty] = torch.nan
    return found


def gradients(function, given):
    leaves = {name: given[name].detach().clone().requires_grad_() for name in LEAVES}
    loss, num_rows = function(**given | leaves)
    found = (
        torch.autograd.grad(loss * 0.5, list(leaves.values()))
        if loss.requires_grad
        else map(torch.zeros_like, leaves.values())
    )
    return loss.detach(), num_rows, *found


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


@given(case=CASES, dense=st.booleans(), use_relu=st.booleans(), block=st.sampled_from([1, 10**4, 2**26]))
def test_float32_against_the_oracle(case, dense, use_relu, block):
    given = arguments(case, dense) | {"use_relu": use_relu}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "BLOCK_BYTES", block)
        results = gradients(indexer_loss, given)
    expected = gradients(oracles.indexer_loss, given)
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


def test_no_loss_where_the_prediction_is_the_target():
    """One head each, the same rows and scales."""
    q, kv = torch.randn(4, 1, 8), torch.randn(9, 1, 8)
    options = {"softmax_scale": 0.7, "index_scale": 0.7, "use_relu": False}
    ranges = {"key_start": torch.zeros(4, dtype=torch.int32), "key_end": torch.arange(1, 5, dtype=torch.int32)}
    loss, num_rows = indexer_loss(q, kv[:, 0], torch.ones(4, 1), q, kv, **options, **ranges)
    torch.testing.assert_close(loss, torch.tensor(0.0), rtol=0, atol=1e-5)
    assert num_rows == 4


@pytest.mark.parametrize("dense", [False, True])
def test_opcheck(dense):
    given = arguments(TOY, dense)
    for name in LEAVES:
        given[name].requires_grad_()
    opcheck(api, "indexer_loss", lambda: indexer_loss(**given))


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
        ({"index_scale": 0.0}, ValueError, "^index_scale must be a finite number above 0, got 0.0$"),
        ({"use_relu": 1}, TypeError, "^use_relu must be True or False, got 1$"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        indexer_loss(**(VALID | change))
