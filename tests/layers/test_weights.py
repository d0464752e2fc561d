"""A module whose weight a layer reads without calling it must have no other effect."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layers.stock import Engine, hidden_states, layer_like, stock
from torch import nn

from flashlatte.layers import parts
from flashlatte.layers.indexer import StepIndexer
from flashlatte.layers.weights import linear_weight, norm_weight

READ = ("kv_b_proj", "kv_a_layernorm", "q_a_layernorm")


class Adapter(nn.Module):
    """Like LoRA's: it exposes the weight of the wrapped module, and adds to its result."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.base_layer = wrapped
        self.eps, self.bias = getattr(wrapped, "eps", None), None

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base_layer(x)


def wrapped(layer, name):
    setattr(layer, name, Adapter(getattr(layer, name)))


def hooked(layer, name):
    getattr(layer, name).register_forward_hook(lambda module, inputs, output: 2 * output)


def replaced(layer, name):
    module = getattr(layer, name)
    module.forward = lambda x: 2 * type(module).forward(module, x)


@pytest.mark.parametrize(
    ("change", "name"), [(change, name) for change in (wrapped, hooked) for name in READ] + [(replaced, "kv_b_proj")]
)
@pytest.mark.parametrize("decoding", [False, True], ids=["prefill", "decode"])
def test_unreadable_weights_are_refused_in_a_step(change, name, decoding):
    engine = Engine(layer_like(stock("v3")), hidden_states((5,)))
    engine.step({0: 4})
    change(engine.layer, name)
    with pytest.raises(TypeError, match=f"^{name} must be a plain module"):
        engine.step({0: 1}) if decoding else Engine(engine.layer, hidden_states((40,))).step({0: 40})


def test_a_bias_and_a_quantized_weight_are_refused():
    layer = nn.Module()
    layer.kv_b_proj = nn.Linear(8, 4)
    with pytest.raises(TypeError, match="got a bias"):
        linear_weight(layer, "kv_b_proj", torch.float32)
    layer.kv_b_proj = nn.Linear(8, 4, bias=False)
    layer.kv_b_proj.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"got .* a weight of torch\.int8"):
        linear_weight(layer, "kv_b_proj", torch.float32)


def test_a_replica_has_its_parameters_elsewhere():
    layer = nn.Module()
    layer.norm = replica = nn.RMSNorm(4)._replicate_for_data_parallel()  # pyright: ignore[reportCallIssue]
    replica._parameters = {}
    replica.weight = torch.ones(4)  # pyright: ignore[reportAttributeAccessIssue]
    assert norm_weight(layer, "norm") is replica.weight


def test_a_hook_of_an_indexers_head_weights_runs():
    indexer = nn.Module()
    indexer.weights_proj = nn.Linear(16, 4, bias=False).requires_grad_(False)
    hidden = torch.randn(3, 16)
    nothing: Any = None
    indexing = StepIndexer(indexer, nothing, nothing, nothing, nothing)  # pyright: ignore[reportArgumentType]
    expected = indexing.head_weights(hidden)
    hooked(indexer, "weights_proj")
    torch.testing.assert_close(indexing.head_weights(hidden), 2 * expected)


def test_weights_are_checked_before_a_model_is_changed():
    module = copy.deepcopy(stock("v3").module)
    parts.check_weights(module, torch.float32)
    hooked(module, "kv_a_layernorm")
    with pytest.raises(TypeError, match=r"^kv_a_layernorm of layer 0 must be a plain module"):
        parts.check_weights(module, torch.float32)


def test_a_norms_forward_may_be_a_kernel():
    layer = layer_like(stock("v3"))
    expected = norm_weight(layer, "kv_a_layernorm")
    replaced(layer, "kv_a_layernorm")
    assert norm_weight(layer, "kv_a_layernorm") is expected
