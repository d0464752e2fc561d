# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

"""The Triton kernels of the indexer's loss against the reference and the oracle, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.indexer_loss_calls import NAMES, arguments, with_gradients
from support.marks import mostly_full

from flashlatte import indexer_loss
from flashlatte.ops.indexer_loss import api
from flashlatte.ops.indexer_loss.portable import launch
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparsePrefillCase

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOY = SparsePrefillCase(5, 60, 4, 40, head_dim=48, d_v=32)
CASES = {
    "toy": (TOY, {}),
    "one head": (replace(TOY, h_q=1), {"h_i": 1}),
    "several blocks of heads": (replace(TOY, h_q=37), {"h_i": 35, "index_dim": 32}),
    "odd sizes": (replace(TOY, head_dim=37, topk=33, h_q=3), {"index_dim": 19}),
    "lengths": (replace(TOY, topk_lengths=True), {}),
    "empty rows": (replace(TOY, empty_rows=0.5, topk_lengths=True), {}),
    "nothing seen": (replace(TOY, empty_rows=1.0), {}),
    "every token twice": (replace(TOY, duplicates=True, s_kv=25), {}),
    "gaps between rows": (replace(TOY, strided=True), {"index_dim": 32}),
    "int64 indices": (replace(TOY, index_dtype=torch.int64, topk_lengths=True), {}),
    "fp16": (replace(TOY, dtype=torch.float16), {}),
    "float32 weights": (TOY, {"weights_dtype": torch.float32}),
    "steep": (replace(TOY, softmax_scale=30.0), {}),
    "mla": (SparsePrefillCase(2, 40, 2, 35, topk_lengths=True), {"h_i": 4, "index_dim": 128}),
}
on_both_stages = pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])


def check(given, **options):
    results = with_gradients(indexer_loss, given, backend="portable", **options)
    expected = with_gradients(indexer_loss, given, backend="reference", **options)
    assert results[1] == expected[1]
    torch.testing.assert_close(results[0], expected[0], rtol=1e-5, atol=1e-5)
    for name, result, wanted in zip(NAMES[2:], results[2:], expected[2:], strict=True):
        assert not result.isnan().any(), name
        compare.assert_close(result, wanted, compare.INDEXER_LOSS_GRADIENT, name)
    return results


@on_both_stages
@pytest.mark.parametrize("name", mostly_full(CASES, "several blocks of heads", "empty rows", "gaps between rows"))
def test_against_the_reference(name, dense):
    case, sizes = CASES[name]
    check(arguments(case, dense, **sizes))


FUZZED = st.builds(
    SparsePrefillCase,
    s_q=st.integers(1, 4),
    s_kv=st.integers(1, 70),
    h_q=st.integers(1, 20),
    topk=st.integers(1, 70),
    head_dim=st.sampled_from([33, 48]),
    d_v=st.just(32),
    topk_lengths=st.booleans(),
    duplicates=st.booleans(),
    invalid_share=st.sampled_from([0.0, 0.5]),
    empty_rows=st.sampled_from([0.0, 0.5, 1.0]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**31),
)


@given(
    case=FUZZED,
    dense=st.booleans(),
    h_i=st.integers(1, 20),
    index_dim=st.sampled_from([1, 19, 32]),
    use_relu=st.booleans(),
    deterministic=st.booleans(),
)
def test_any_sizes_and_indices(case, dense, h_i, index_dim, use_relu, deterministic):
    """Keys visible to no query are NaN, and so are queries without visible keys."""
    inputs = arguments(case, dense, h_i, index_dim) | {"use_relu": use_relu}
    results = with_gradients(indexer_loss, inputs, backend="portable", deterministic=deterministic)
    expected = with_gradients(indexer_loss, inputs, backend="reference")
    assert results[1] == expected[1]
    torch.testing.assert_close(results[0], expected[0], rtol=1e-4, atol=1e-4)
    for result, wanted in zip(results[2:], expected[2:], strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0.02 * wanted.abs().max().item() + 1e-3)


@pytest.mark.parametrize("name", mostly_full(CASES, "odd sizes", "every token twice"))
@pytest.mark.parametrize("use_relu", [True, False])
@on_both_stages
def test_against_the_oracle(name, use_relu, dense):
    case, sizes = CASES[name]
    given = arguments(case, dense, **sizes) | {"use_relu": use_relu}
    results = with_gradients(indexer_loss, given, backend="portable")
    exact = with_gradients(oracles.indexer_loss, given)
    plain = with_gradients(oracles.indexer_loss, given, dtype=torch.bfloat16)
    assert results[1] == exact[1]
    for name, result, oracle, baseline in zip(NAMES[2:], results[2:], exact[2:], plain[2:], strict=True):
        compare.assert_accurate(result, oracle, baseline, name)
    torch.testing.assert_close(results[0].double(), exact[0], rtol=1e-5, atol=1e-5)


@on_both_stages
@pytest.mark.parametrize("rows", [pytest.param(1, id="one token"), pytest.param(2, id="two tokens")])
def test_a_few_tokens_at_once(monkeypatch, dense, rows):
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 4 * rows * (60 if dense else 40))
    monkeypatch.setattr(launch, "_LOSS_BLOCK", 16)
    check(arguments(TOY, dense))


@on_both_stages
def test_targets_in_splits(monkeypatch, dense):
    """With more heads than a program processes at once."""
    monkeypatch.setattr(launch, "_SPLIT", 32)
    check(arguments(replace(TOY, h_q=37, s_kv=100, topk=70, empty_rows=0.2), dense))


def test_groups_of_tokens_with_ranges_of_keys(monkeypatch):
    monkeypatch.setattr(launch, "_GROUP", 4)
    check(arguments(replace(TOY, s_q=9, s_kv=100), True))


@pytest.mark.parametrize(
    "scratch_rows",
    [pytest.param(10**6, id="one piece"), pytest.param(80, id="two tokens"), pytest.param(13, id="slots")],
)
def test_deterministic_sums_in_pieces(monkeypatch, scratch_rows):
    monkeypatch.setattr(launch, "CONTRIBUTION_BYTES", 4 * 6 * scratch_rows)
    given = arguments(replace(TOY, duplicates=True, s_kv=25, topk_lengths=True), False)
    results = check(given, deterministic=True)
    again = with_gradients(indexer_loss, given, backend="portable", deterministic=True)
    for first, second in zip(results, again, strict=True):
        assert first.equal(second)


@on_both_stages
def test_given_lse(dense):
    """Among a query's heads, one with a lower lse has more weight."""
    given = arguments(replace(TOY, empty_rows=0.3), dense)
    lse = torch.randn(4, TOY.s_q, generator=torch.Generator().manual_seed(0)).T
    lse[given["q"].isnan().any(dim=-1)] = -torch.inf
    check(given, lse=lse)


@on_both_stages
def test_the_target_of_two_ranks(monkeypatch, dense):
    """The second rank adds the first one's probabilities to its own, before either normalizes them."""
    given = arguments(replace(TOY, h_q=5, empty_rows=0.3), dense)
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 4 * 2 * (60 if dense else 40))
    monkeypatch.setattr(api, "group_name", lambda group: group)
    of_first: list[torch.Tensor] = []
    monkeypatch.setattr(launch, "sum_over_ranks", lambda target, _: of_first.append(target.clone()))
    with_gradients(indexer_loss, given | {"q": given["q"][:, :2]}, backend="portable", group="ranks")
    assert len(of_first) == 3
    monkeypatch.setattr(launch, "sum_over_ranks", lambda target, _: target.add_(of_first.pop(0)))
    results = with_gradients(indexer_loss, given | {"q": given["q"][:, 2:]}, backend="portable", group="ranks")
    expected = with_gradients(indexer_loss, given, backend="portable")
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


@on_both_stages
def test_one_key_has_no_gradient(dense):
    case = SparsePrefillCase(9, 1, 5, 1, head_dim=48, d_v=32, invalid_share=0.0, softmax_scale=3.0)
    given = arguments(case, dense, h_i=2, index_dim=16)
    loss, _, *found = with_gradients(indexer_loss, given, backend="portable")
    assert loss == 0
    assert all(gradient.eq(0).all() for gradient in found)


@on_both_stages
def test_no_gradient_if_all_probabilities_underflow(dense):
    """As with an lse that includes a large sink."""
    given = arguments(replace(TOY, empty_rows=0.3), dense)
    lse = torch.full((TOY.s_q, TOY.h_q), 300.0)
    lse[1::2] = torch.inf
    for backend in ("portable", "reference"):
        loss, num_rows, *found = with_gradients(indexer_loss, given, lse=lse, backend=backend)
        assert loss == 0
        assert num_rows > 0
        assert all(gradient.eq(0).all() for gradient in found)


@on_both_stages
def test_without_gradients(dense):
    given = arguments(replace(TOY, empty_rows=0.3), dense)
    loss, num_rows = indexer_loss(**given, backend="portable")
    assert (loss, num_rows) == with_gradients(indexer_loss, given, backend="portable")[:2]


def test_lengths_and_ranges_at_their_limits():
    given = arguments(replace(TOY, s_q=4), False)
    length = torch.tensor([-5, 2**31 - 1, 0, 3], dtype=torch.int32)
    check(given | {"topk_length": length})
    check(given | {"topk_length": length.long() * 2**20})
    given = arguments(replace(TOY, s_q=4), True)
    everything = ("q", "kv", "index_q", "index_k", "index_weights")
    given = {name: x.nan_to_num(nan=0.1) if name in everything else x for name, x in given.items()}
    limits = torch.tensor([[-(2**40), 2**40], [2**40, -(2**40)], [59, 2**35], [-7, 1]])
    check(given | {"key_start": limits[:, 0], "key_end": limits[:, 1]})


def test_refuses_rows_that_do_not_fit():
    for sizes, message in (({"index_dim": 272}, "index head dims up to 256, not 272"), ({}, "up to 576, not 584")):
        given = arguments(replace(TOY, head_dim=48 if sizes else 584), False, **sizes)
        with pytest.raises(ValueError, match=message):
            indexer_loss(**given, backend="portable")
