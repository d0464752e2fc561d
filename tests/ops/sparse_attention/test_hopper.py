# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

"""The Hopper kernels of sparse attention's backward pass, emulated on the CPU."""

from dataclasses import replace

import pytest
import torch
from support.gradient_calls import sparse_attention_gradients
from support.marks import mostly_full

from flashlatte import sparse_attention
from flashlatte.ops.sparse_attention import api
from flashlatte.runtime import dispatch, machine
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparsePrefillCase

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="imports Gluon kernels")

TOY = SparsePrefillCase(3, 150, 3, 140, topk_lengths=True)
CASES = {
    "toy": TOY,
    "one head": replace(TOY, h_q=1),
    "two blocks of heads": replace(TOY, s_q=2, h_q=70),
    "128 heads": replace(TOY, s_q=1, h_q=128),
    "no rope": replace(TOY, head_dim=512, h_q=65),
    "all indices": replace(TOY, topk_lengths=False, invalid_share=0.0),
    "one index": replace(TOY, topk=1),
    "empty rows": replace(TOY, s_q=6, empty_rows=0.5),
    "nothing selected": replace(TOY, empty_rows=1.0),
    "every token twice": replace(TOY, duplicates=True, s_kv=25),
    "without sinks": replace(TOY, attn_sink=False),
    "gaps between rows": replace(TOY, strided=True, h_q=70),
    "int64 indices": replace(TOY, index_dtype=torch.int64),
    "fp16": replace(TOY, dtype=torch.float16),
}
NAMES = ("out", "lse", "dq", "dkv", "d_sink")


@pytest.fixture
def emulated(monkeypatch, emulation):
    """Makes the backward pass of ``backend="reference"`` run the emulated Hopper kernels."""
    from flashlatte.ops.sparse_attention.hopper import launch

    emulation(seed=1)
    hopper = dispatch.Implementation("reference", lambda: launch.backward)
    monkeypatch.setitem(dispatch._REGISTRY[api.BACKWARD], "reference", hopper)
    return launch


def run(inputs, **options):
    return sparse_attention_gradients(sparse_attention, inputs, backend="reference", **options)


def check(inputs, **options):
    """Errors are at most twice those of plain bf16 PyTorch."""
    with_dlse = options.get("with_dlse", True)
    results = run(inputs, **options)
    oracle = sparse_attention_gradients(oracles.sparse_attention, inputs, with_dlse)
    baseline = sparse_attention_gradients(oracles.sparse_attention, inputs, with_dlse, dtype=torch.bfloat16)
    for name, result, exact, plain in zip(NAMES[2:], results[2:], oracle[2:], baseline[2:], strict=False):
        assert not result.isnan().any(), name
        compare.assert_accurate(result, exact, plain, name)
    return results


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", mostly_full(CASES, "one index"))
def test_against_the_oracle(emulated, name, deterministic):
    check(CASES[name].inputs(), deterministic=deterministic)


@pytest.mark.full
@pytest.mark.parametrize("name", ["two blocks of heads", "empty rows"])
@pytest.mark.parametrize(("tokens", "scratch_rows"), [(1, 10**6), (2, 10**6), (2, 150), (4, 64)])
def test_pieces(monkeypatch, emulated, name, tokens, scratch_rows):
    """For scratch sizes that hold P and dS of some tokens, and contributions of all or some of their slots."""
    case = CASES[name]
    inputs = case.inputs()
    whole = run(inputs, deterministic=True)
    monkeypatch.setattr(emulated, "SCORE_BYTES", tokens * 3 * -(-case.h_q // 64) * 2 * 8192)
    monkeypatch.setattr(emulated, "SCRATCH_BYTES", scratch_rows * 4 * case.head_dim)
    for result, expected in zip(run(inputs, deterministic=True), whole, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-4, equal_nan=True)


@pytest.mark.full
def test_nan_in_a_query_stays_with_the_keys_that_it_selected(emulated):
    inputs = replace(TOY, invalid_share=0.0, topk=5, topk_lengths=False).inputs()
    expected = run(inputs)
    inputs["q"] = inputs["q"].clone()
    inputs["q"][1] = torch.nan
    results = run(inputs)
    touched = torch.zeros(150, dtype=torch.bool)
    touched[inputs["indices"][1, 0].long()] = True
    assert results[2][[0, 2]].equal(expected[2][[0, 2]])
    assert results[3][touched].isnan().all()
    torch.testing.assert_close(results[3][~touched], expected[3][~touched], rtol=1e-2, atol=1e-5)


def test_is_chosen_on_hopper_for_up_to_128_heads(monkeypatch):
    monkeypatch.setattr(machine, "compute_capability", lambda _: (9, 0))
    device = torch.device("cuda", 0)
    call = dispatch.CallSpec(api.BACKWARD, device, torch.bfloat16, head_dim=576, head_dim_v=512, h_q=128)
    assert dispatch.select(call) == "hopper"
    assert dispatch.select(replace(call, h_q=129)) == "portable"
    assert dispatch.select(replace(call, rows_aligned=False)) == "portable"
    with pytest.raises(ValueError, match="it takes up to 128 heads, not 129"):
        dispatch.select(replace(call, h_q=129), "hopper")
