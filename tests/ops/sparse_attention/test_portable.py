# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

"""The Triton kernels of sparse attention's backward pass against the reference, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gradient_calls import sparse_attention_gradients
from support.marks import mostly_full

from flashlatte import sparse_attention
from flashlatte.kernels.triton import key_sums
from flashlatte.ops.sparse_attention.portable import launch
from flashlatte.testing import compare
from flashlatte.testing.cases import SparsePrefillCase

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOY = SparsePrefillCase(4, 60, 4, 40, head_dim=48, d_v=32)
CASES = {
    "toy": TOY,
    "one head": replace(TOY, h_q=1),
    "several blocks of heads": replace(TOY, h_q=37),
    "odd sizes": replace(TOY, head_dim=37, d_v=20, topk=33, h_q=3),
    "no rope": replace(TOY, head_dim=32),
    "more rope than values": replace(TOY, d_v=16),
    "lengths": replace(TOY, topk_lengths=True),
    "empty rows": replace(TOY, empty_rows=0.5, topk_lengths=True),
    "nothing selected": replace(TOY, empty_rows=1.0),
    "every token twice": replace(TOY, duplicates=True, s_kv=25),
    "without sinks": replace(TOY, attn_sink=False),
    "gaps between rows": replace(TOY, strided=True),
    "int64 indices": replace(TOY, index_dtype=torch.int64, topk_lengths=True),
    "fp16": replace(TOY, dtype=torch.float16),
    "mla": SparsePrefillCase(2, 40, 2, 35, topk_lengths=True),
    "v4": SparsePrefillCase(2, 40, 2, 35, head_dim=512),
}
NAMES = ("out", "lse", "dq", "dkv", "d_sink")


def run(inputs, backend, **options):
    return sparse_attention_gradients(sparse_attention, inputs, backend=backend, **options)


def check(inputs, **options):
    results, expected = run(inputs, "portable", **options), run(inputs, "reference")
    for name, result, wanted in zip(NAMES, results, expected, strict=False):
        tolerance = compare.SPARSE_PREFILL_LSE if name == "lse" else compare.SPARSE_ATTENTION_GRADIENT
        assert not result.isnan().any(), name
        compare.assert_close(result, wanted, tolerance, name)
    return results


@pytest.mark.parametrize("name", mostly_full(CASES, "empty rows", "every token twice", "gaps between rows", "mla"))
def test_against_the_reference(name):
    check(CASES[name].inputs())


FUZZED = st.builds(
    SparsePrefillCase,
    s_q=st.integers(1, 4),
    s_kv=st.integers(1, 20),
    h_q=st.integers(1, 20),
    topk=st.integers(1, 70),
    head_dim=st.sampled_from([33, 48]),
    d_v=st.sampled_from([20, 32]),
    topk_lengths=st.booleans(),
    attn_sink=st.booleans(),
    duplicates=st.booleans(),
    invalid_share=st.sampled_from([0.0, 0.5]),
    empty_rows=st.sampled_from([0.0, 0.5, 1.0]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**31),
)


@given(case=FUZZED, with_dlse=st.booleans(), deterministic=st.booleans())
def test_any_sizes_and_indices(case, with_dlse, deterministic):
    """Keys selected by no query are NaN, and so are queries that select nothing, and the gradients of their results."""
    inputs = case.inputs()
    _, lse = sparse_attention(**inputs, backend="reference")
    inputs["q"][lse.isinf().all(dim=-1)] = torch.nan
    options = {"portable": {"deterministic": deterministic}, "reference": {}}
    results, expected = (
        sparse_attention_gradients(sparse_attention, inputs, with_dlse, backend=backend, **given)
        for backend, given in options.items()
    )
    for name, result, wanted in zip(NAMES, results, expected, strict=False):
        assert not result.isnan().any(), name
        # Of one key dq is 0, and only rounding errors are left of it.
        finite = wanted.masked_fill(wanted.isinf(), 0.0).float()
        torch.testing.assert_close(result.float(), wanted.float(), rtol=0, atol=0.02 * finite.abs().max().item() + 0.01)


@pytest.mark.parametrize("name", mostly_full(CASES, "empty rows", "every token twice"))
@pytest.mark.parametrize(
    "scratch_rows",
    [pytest.param(10**6, id="one piece"), pytest.param(80, id="two tokens"), pytest.param(13, id="slots")],
)
def test_deterministic_sums_in_pieces(monkeypatch, name, scratch_rows):
    """For scratch sizes that hold all tokens, a few, or only some slots of a token."""
    case = CASES[name]
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 4 * case.head_dim * scratch_rows)
    inputs = case.inputs()
    results = check(inputs, deterministic=True)
    for first, second in zip(results, run(inputs, "portable", deterministic=True), strict=True):
        assert first.equal(second)


@pytest.mark.parametrize("s_q", [4, 5])
def test_keys_of_several_pieces_are_sorted_at_once(monkeypatch, s_q):
    """The last of five tokens is a separate piece."""
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 4 * TOY.head_dim * 80)
    inputs = replace(TOY, s_q=s_q, topk_lengths=True, duplicates=True, s_kv=25).inputs()
    sorts = []
    sort = torch.sort
    monkeypatch.setattr(torch, "sort", lambda *args, **options: sorts.append(1) or sort(*args, **options))
    together = run(inputs, "portable", deterministic=True)
    monkeypatch.setattr(key_sums, "SORTED_ENTRIES", 1)
    apart = run(inputs, "portable", deterministic=True)
    assert len(sorts) == 1 + -(-s_q // 2)
    for first, second in zip(together, apart, strict=True):
        assert first.equal(second)


@pytest.mark.parametrize("head_dim", [576, pytest.param(512, marks=pytest.mark.full)])
def test_laid_out_for_warp_groups(monkeypatch, head_dim):
    for table in (launch.KEYS, launch.QUERIES):
        monkeypatch.setitem(table, "interpreter", (launch.AttentionConfig(32, 32, num_warps=1, warpgroups=True),))
    launch._compiled_for.cache_clear()
    check(SparsePrefillCase(2, 50, 37, 40, head_dim=head_dim, empty_rows=0.3).inputs())
    launch._compiled_for.cache_clear()


def test_more_programs_than_a_grid_holds(monkeypatch):
    monkeypatch.setattr(key_sums, "_MAX_GRID", 3)
    check(replace(TOY, s_q=5).inputs())


def test_lengths_outside_the_list():
    inputs = TOY.inputs()
    length = torch.tensor([-5, 2**31 - 1, 0, 3], dtype=torch.int32)
    check(inputs | {"topk_length": length})
    check(inputs | {"topk_length": length.long() * 2**20}, deterministic=True)


def test_lengths_and_sinks_that_are_not_neighbors():
    inputs = replace(TOY, topk_lengths=True).inputs()
    apart = {name: inputs[name].repeat_interleave(2)[::2] for name in ("topk_length", "attn_sink")}
    check(inputs | apart)


@pytest.mark.parametrize("deterministic", [False, True])
def test_sinks_at_their_limits(deterministic):
    """inf makes every output 0, -inf is no sink; far below lse, 1 - w must not cancel in the sink's gradient."""
    inputs = replace(TOY, empty_rows=0.3).inputs()
    sinks = torch.tensor([torch.inf, -torch.inf, 80.0, -80.0])
    results = check(inputs | {"attn_sink": sinks}, deterministic=deterministic)
    assert results[-1].isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_nan_in_a_query_stays_with_the_keys_that_it_selected(deterministic):
    inputs = replace(TOY, invalid_share=0.0, topk=5).inputs()
    expected = run(inputs, "portable", deterministic=True)
    inputs["q"] = inputs["q"].clone()
    inputs["q"][1] = torch.nan
    results = run(inputs, "portable", deterministic=deterministic)
    touched = torch.zeros(60, dtype=torch.bool)
    touched[inputs["indices"][1, 0].long()] = True
    others = [0, 2, 3]
    torch.testing.assert_close(results[2][others], expected[2][others], rtol=0, atol=0)
    assert results[3][touched].isnan().all()
    torch.testing.assert_close(results[3][~touched], expected[3][~touched], rtol=1e-2, atol=1e-5)


def test_refuses_rows_that_do_not_fit():
    inputs = replace(TOY, head_dim=584).inputs()
    inputs["q"].requires_grad_()
    with pytest.raises(ValueError, match="up to 576, not 584"):
        sparse_attention(**inputs, backend="portable")
