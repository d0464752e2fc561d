"""Compile test of the kernel without products, and the scratch memory of a call."""

import pytest
from support.launches import launches
from support.marks import mostly_full
from support.recording import Recording

from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


@pytest.mark.parametrize("arch", mostly_full((80, 90, 100), 90))
@pytest.mark.parametrize("with_gradient", [True, False])
def test_the_loss_kernel_spills_nothing(monkeypatch, arch, with_gradient):
    found = launches(Recording(monkeypatch), "indexer_loss", "portable", with_gradient=with_gradient, arch=arch)
    (loss,) = (one for one in found if one.name == "loss_kernel")
    code = loss.compile(arch)
    assert code.spills == 0, code
    assert code.registers > 16, code


@pytest.mark.parametrize(
    "call",
    [{"s_q": 300, "topk": 2048}, {"s_q": 3, "topk": 150_000}, {"s_q": 200, "topk": None, "s_kv": 100_000}],
    ids=str,
)
def test_scratch_is_bounded(monkeypatch, call):
    found = launches(
        Recording(monkeypatch), "indexer_loss", "portable", **call, heads=1, index_heads=1, deterministic=True
    )
    scratch = {
        name: tensor.nbytes
        for one in found
        for name, tensor in one.launch.arguments.items()
        if name in ("target", "logits", "contributions") or (name == "d_index_k" and one.name == "range_keys_kernel")
    }
    assert {"target", "logits"} < set(scratch)
    assert scratch["target"] <= 16 << 20
    assert scratch["logits"] <= 16 << 20
    assert scratch.get("contributions", 0) <= 256 << 20
    assert scratch.get("d_index_k", 0) <= 64 << 20
