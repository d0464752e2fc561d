# Keyword arguments are put together in dicts of mixed values.
# pyright: reportArgumentType=false

"""The Hopper kernels of the indexer's loss, emulated on the CPU."""

from dataclasses import replace

import pytest
import torch
from support.indexer_loss_calls import NAMES, arguments, with_gradients
from support.marks import mostly_full

from flashlatte import indexer_loss
from flashlatte.runtime import machine
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
def emulated(monkeypatch):
    """Returns the module that launches. Fresh tensors hold NaN."""
    from support.emulator.emulated import Emulation

    from flashlatte.ops.indexer_loss.hopper import launch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    Emulation(monkeypatch, seed=1)
    yield launch
    torch.use_deterministic_algorithms(before)


def check(given, **options):
    """Errors of the gradients are at most twice those of plain bf16 PyTorch."""
    results = with_gradients(indexer_loss, given, backend="hopper", **options)
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


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", mostly_full(CASES, "one index"))
def test_against_the_oracle(emulated, name, dense):
    case, sizes = CASES[name]
    check(arguments(case, dense, **sizes))
