"""Projections with adjacent weights are one matrix product; all others are called unchanged."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.threads import at_the_same_time
from torch import nn
from torch.nn import functional

from flashlatte.layers import (
    MLAAttention,
    MLAConfig,
    V4Attention,
    V4Config,
    V4IndexerConfig,
    forward,
    fused_projections,
)
from flashlatte.layers.fused_projections import fuse_weights, fuse_weights_on_gpu, fused_linear
from flashlatte.layers.v4 import modules

WIDTHS = (32, 16, 8)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def linears() -> Any:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Linear(64, width, bias=False) for width in WIDTHS]
    for linear in made:
        linear.weight.data.normal_(generator=generator)
    return nn.ModuleList(made).requires_grad_(False)


@pytest.fixture
def hidden():
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def products(monkeypatch):
    """The number of weight rows of each matrix product."""
    counts = []

    def linear(x, weight, bias=None):
        counts.append(weight.shape[0])
        return functional.linear(x, weight, bias)

    monkeypatch.setattr(fused_projections, "functional", SimpleNamespace(linear=linear))
    return counts


def check(projections, hidden):
    for actual, projection in zip(fused_linear(hidden, *projections), projections, strict=True):
        torch.testing.assert_close(actual, projection(hidden.to(projection.weight.dtype)))


def test_threads_move_weights_once():
    for _ in range(20):
        projections = linears()

        def fuse(_: int, projections: Any = projections) -> list[int]:
            fuse_weights(*projections)
            return [projection.weight.data_ptr() for projection in projections]

        assert len(set(map(tuple, at_the_same_time(fuse, threads=4)))) == 1


def test_one_product_computes_all_projections(hidden, products):
    projections = linears()
    weights = [linear.weight for linear in projections]
    before = [weight.clone() for weight in weights]
    fuse_weights(*projections)
    assert [linear.weight for linear in projections] == weights
    for weight, value in zip(weights, before, strict=True):
        assert weight.equal(value)
    check(projections, hidden)
    assert products == [sum(WIDTHS)]
    fuse_weights(*projections)
    check(projections, hidden)


def test_projections_with_separate_weights_are_called_one_by_one(hidden, products):
    check(linears(), hidden)
    assert products == []


def test_updates_of_a_weight_are_seen(hidden, products):
    projections = linears()
    fuse_weights(*projections)
    projections[1].weight.mul_(3)
    check(projections, hidden)
    other = linears()
    projections.load_state_dict({name: value + 1 for name, value in other.state_dict().items()})
    check(projections, hidden)
    assert products == [sum(WIDTHS)] * 2
    projections[1].weight = nn.Parameter(torch.randn(16, 64), requires_grad=False)
    check(projections, hidden)
    assert len(products) == 2


def _hook(linear):
    linear.register_forward_hook(lambda module, args, out: out + 1)


def _pre_hook(linear):
    linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def _instance_forward(linear):
    original = linear.forward
    linear.forward = lambda x: original(x) + 1


def _class(linear):
    linear.__class__ = Scaled


def _bias(linear):
    linear.bias = nn.Parameter(torch.ones(linear.out_features))


def _replica(linear):
    weight = linear.weight.detach()
    del linear._parameters["weight"]
    linear.weight = weight


def _transposed(linear):
    linear.weight.data = linear.weight.data.t().contiguous().t()


@pytest.mark.parametrize("change", [_hook, _pre_hook, _instance_forward, _class, _bias, _replica, _transposed])
@pytest.mark.parametrize("number", range(3))
def test_modules_that_are_more_than_a_product_are_called(hidden, products, change, number):
    projections = linears()
    fuse_weights(*projections)
    change(projections[number])
    check(projections, hidden)
    # The other two are still neighbors if the changed one is not between them.
    assert products == ([] if number == 1 else [sum(WIDTHS) - WIDTHS[number]])


def test_the_replacement_of_a_layer_is_called(hidden):
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1

    projections = linears()
    fuse_weights(*projections)
    first, wrapped, last = projections[0], Wrapper(projections[1]), projections[2]
    results = fused_linear(hidden, first, wrapped, last)
    for actual, projection in zip(results, (first, wrapped, last), strict=True):
        torch.testing.assert_close(actual, projection(hidden))


def test_another_dtype_begins_another_product(hidden, products):
    projections = linears()
    projections[2].to(torch.bfloat16)
    fuse_weights(*projections)
    check(projections, hidden)
    assert products == [48]
    assert fused_linear(hidden, *projections)[2].dtype == torch.bfloat16


def test_gradients_reach_each_weight(hidden, products):
    projections = linears()
    fuse_weights(*projections)
    projections.requires_grad_(True)
    torch.cat(fused_linear(hidden, *projections), dim=1).sum().backward()
    assert all(linear.weight.grad is not None for linear in projections)
    assert products == []
    with torch.no_grad():
        check(projections, hidden)
    assert products == [sum(WIDTHS)]


def test_views_are_not_moved(hidden):
    """Such as views of a flat parameter, or of a tensor with other references."""
    whole = torch.randn(sum(WIDTHS), 64)
    projections = linears()
    for linear, part in zip(reversed(projections), whole.split(WIDTHS[::-1]), strict=True):
        linear.weight.data = part
    addresses = [linear.weight.data_ptr() for linear in projections]
    fuse_weights(*projections)
    assert [linear.weight.data_ptr() for linear in projections] == addresses
    check(projections, hidden)


def test_adjacent_tensors_of_different_storages_are_not_fused(hidden, products):
    """Two separate tensors whose memory happens to be adjacent."""
    memory = torch.randn(48, 64)
    projections = linears()[:2]
    for linear, begin in zip(projections, (0, 32), strict=True):
        rows = linear.out_features
        linear.weight.data = torch.from_numpy(memory.numpy()[begin : begin + rows])
    assert projections[1].weight.data_ptr() == projections[0].weight.data_ptr() + projections[0].weight.nbytes
    check(projections, hidden)
    assert products == []


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state dict", "safetensors"])
def test_copies_compute_the_same(hidden, how, tmp_path):
    projections = linears()
    fuse_weights(*projections)
    copied = linears()
    if how == "deepcopy":
        copied = copy.deepcopy(projections)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(projections))
    elif how == "state dict":
        file = io.BytesIO()
        torch.save(projections.state_dict(), file)
        file.seek(0)
        copied.load_state_dict(torch.load(file))
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(projections.state_dict(), tmp_path / "weights.safetensors")
        copied.load_state_dict(safetensors.load_file(tmp_path / "weights.safetensors"))
    check(copied, hidden)
    for mine, theirs in zip(projections, copied, strict=True):
        assert mine.weight.equal(theirs.weight)
        theirs.weight.zero_()
        assert mine.weight.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_a_state_dict_have_storages_of_their_own(dtype, tmp_path):
    projections = linears().to(dtype)
    fuse_weights(*projections)
    state = projections.state_dict()
    assert {weight.untyped_storage().nbytes() - weight.nbytes for weight in state.values()} == {0}
    assert len({weight.untyped_storage().data_ptr() for weight in state.values()}) == len(WIDTHS)
    # They are the weights themselves: writes to them change the layers.
    state["1.weight"].fill_(7)
    assert (projections[1].weight == 7).all()
    assert projections.state_dict(keep_vars=True)["1.weight"] is projections[1].weight
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(projections, str(tmp_path / "model.safetensors"))
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert len(saved) == len(WIDTHS)
    assert all(saved[name].equal(weight) for name, weight in state.items())


def test_weights_on_a_cpu_are_not_moved(hidden, products):
    projections = linears()
    fuse_weights_on_gpu([list(projections)])
    check(projections, hidden)
    assert products == []


@pytest.mark.parametrize("ratio", [None, 0, 4, 128])
def test_copied_and_moved_layers_have_one_product(ratio):
    layer: Any
    of_layer: Any
    if ratio is None:
        layer = MLAAttention(MLAConfig(64, 2, q_lora_rank=24), dtype=torch.float32)
        of_layer = forward.hidden_projections
    else:
        config = V4Config(ratio=ratio, indexer=V4IndexerConfig() if ratio == 4 else None)
        config = replace(config, hidden_size=64, num_attention_heads=8, q_lora_rank=24)
        layer = V4Attention(config, dtype=torch.float32)
        of_layer = functools.partial(modules.hidden_projections, config=config)
    for moved in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).bfloat16()):
        found = of_layer(moved)
        whole = sum(projection.weight.nbytes for projection in found)
        assert {projection.weight.untyped_storage().nbytes() for projection in found} == {whole}


def test_no_rows_and_no_projections():
    projections = linears()
    fuse_weights(*projections)
    assert [result.shape for result in fused_linear(torch.empty(0, 64), *projections)] == [(0, n) for n in WIDTHS]
    fuse_weights()
    assert fused_linear(torch.empty(1, 64)) == []
