# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

"""The Hopper kernels of the indexer's loss, emulated on the CPU."""

from dataclasses import replace

import pytest
import torch
from support.indexer_loss_calls import NAMES, arguments, with_gradients
from support.marks import mostly_full

from flashlatte import indexer_loss
from flashlatte.ops.indexer_loss import api
from flashlatte.runtime import dispatch, machine
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparsePrefillCase

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="imports Gluon kernels")

TOY = SparsePrefillCase(3, 150, 3, 200, topk_lengths=True)
SMALL = {"h_i": 16, "index_dim": 128}
CASES = {
    "toy": (TOY, SMALL),
    "one head": (replace(TOY, h_q=1), SMALL),
    "two blocks of heads": (replace(TOY, s_q=2, h_q=70), SMALL),
    "128 heads": (replace(TOY, s_q=1, h_q=128, s_kv=500, topk=400), {"h_i": 64, "index_dim": 128}),
    "no rope": (replace(TOY, head_dim=512, h_q=65), SMALL),
    "all indices": (replace(TOY, topk_lengths=False, invalid_share=0.0), SMALL),
    "one index": (replace(TOY, topk=1), SMALL),
    "empty rows": (replace(TOY, s_q=6, empty_rows=0.5), SMALL),
    "nothing selected": (replace(TOY, empty_rows=1.0), SMALL),
    "every token twice": (replace(TOY, duplicates=True, s_kv=25, topk=40), SMALL),
    "gaps between rows": (replace(TOY, strided=True, h_q=70), SMALL),
    "int64 indices": (replace(TOY, index_dtype=torch.int64), SMALL),
    "fp16": (replace(TOY, dtype=torch.float16), SMALL),
}


@pytest.fixture
def emulated(emulation):
    """Starts the emulation; returns the launch module."""
    from flashlatte.ops.indexer_loss.hopper import launch

    emulation(seed=1)
    return launch


def check(given, lse=None, **options):
    """Errors of the gradients are at most twice those of plain bf16 PyTorch."""
    results = with_gradients(indexer_loss, given, backend="hopper", lse=lse, **options)
    options.pop("deterministic", None)
    oracle = with_gradients(oracles.indexer_loss, given, **options)
    baseline = with_gradients(oracles.indexer_loss, given, dtype=torch.bfloat16, **options)
    assert results[1] == oracle[1]
    for name, result, exact, plain in zip(NAMES, results, oracle, baseline, strict=True):
        assert not result.isnan().any(), name
        if name == "loss":
            compare.assert_close(result, exact.float(), compare.INDEXER_LOSS, name)
        elif name != "num_rows":
            compare.assert_accurate(result, exact, plain, name)


@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.full)], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", mostly_full(CASES, "one index"))
def test_against_the_oracle(emulated, name, dense):
    case, sizes = CASES[name]
    check(arguments(case, dense, **sizes))


OPTIONS = {
    "no relu": ({}, {"use_relu": False}),
    "deterministic": ({}, {"deterministic": True}),
    "weights in float32": ({"weights_dtype": torch.float32}, {}),
    # The portable kernels compute loss and gradients.
    "65 index heads": ({"h_i": 65}, {}),
    "index dim 64": ({"index_dim": 64}, {}),
}


@pytest.mark.parametrize("name", mostly_full(OPTIONS))
def test_options(emulated, name):
    sizes, options = OPTIONS[name]
    check(arguments(TOY, False, **SMALL | sizes), **options)


@pytest.mark.full
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_lse_of_the_attention(emulated, dense):
    given = arguments(replace(TOY, topk_lengths=False), dense, **SMALL)
    position = torch.arange(150)
    if dense:
        seen = (position >= given["key_start"][:, None]) & (position < given["key_end"][:, None])
        times = seen.double()
    else:
        valid = (given["indices"][:, 0] >= 0) & (given["indices"][:, 0] < 150)
        times = torch.zeros(3, 150, dtype=torch.float64)
        times.scatter_add_(1, torch.where(valid, given["indices"][:, 0], 0).long(), valid.double())
    keys = given["kv"][:, 0].double().nan_to_num()
    scores = given["q"].double().nan_to_num() @ keys.T * given["softmax_scale"]
    lse = (scores.exp() * times[:, None]).sum(dim=-1).log().float()
    # Heads are the first axis of memory.
    check(given, lse.T.contiguous().T)


def test_no_gradient_if_all_probabilities_underflow(emulated):
    loss, num_rows, *found = with_gradients(
        indexer_loss, arguments(replace(TOY, topk=70), False, **SMALL), backend="hopper", lse=torch.full((3, 3), 300.0)
    )
    assert (loss, num_rows) == (0, 3)
    assert all(gradient.eq(0).all() for gradient in found)


@pytest.mark.full
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_pieces(monkeypatch, emulated, dense):
    """One token at a time, and several programs for the slots of a token."""
    monkeypatch.setattr("flashlatte.ops.indexer_loss.portable.launch.SCRATCH_BYTES", 4 * 200)
    monkeypatch.setattr(emulated, "_SPLIT", 128)
    check(arguments(TOY, dense, **SMALL))


@pytest.mark.full
def test_without_gradient(emulated):
    given = arguments(TOY, False, **SMALL)
    results, expected = (indexer_loss(**given, backend=backend) for backend in ("hopper", "reference"))
    compare.assert_close(results[0], expected[0], compare.INDEXER_LOSS, "loss")
    assert results[1] == expected[1]


@pytest.mark.full
def test_nan_in_a_query_stays_with_the_keys_that_it_selected(emulated):
    case = replace(TOY, invalid_share=0.0, topk=5, topk_lengths=False)
    given = arguments(case, False, **SMALL)
    given["index_q"][1] = torch.nan
    results, expected = (with_gradients(indexer_loss, given, backend=backend) for backend in ("hopper", "reference"))
    assert results[1] == 3
    assert expected[3].isnan().any()
    for result, wanted in zip(results[2:], expected[2:], strict=True):
        assert result.isnan().equal(wanted.isnan())
        torch.testing.assert_close(result, wanted, rtol=3e-2, atol=1e-3, equal_nan=True)


def test_refusals(monkeypatch):
    monkeypatch.setattr(machine, "compute_capability", lambda _: (9, 0))
    device = torch.device("cuda", 0)
    call = dispatch.CallSpec(api.OPERATION, device, torch.bfloat16, head_dim=576, index_dim=128, h_q=128, h_kv=1)
    assert dispatch.select(call) == "hopper"
    for change, reason in (
        ({"h_q": 129}, "takes up to 128 heads, not 129"),
        ({"head_dim": 192}, "takes head dims 576 and 512, not 192"),
        ({"rows_aligned": False}, "takes tensors whose rows begin at multiples of 16 bytes"),
        ({"index_dim": 300}, "takes index head dims up to 256, not 300"),
    ):
        with pytest.raises(ValueError, match=reason):
            dispatch.select(replace(call, **change), "hopper")
