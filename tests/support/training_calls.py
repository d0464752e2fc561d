"""A training step of a layer in bf16, compared with the same step in float32."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from flashlatte.layers import MLAAttention, MLAConfig, V4Attention, V4Config, training
from flashlatte.layers.v4 import training as v4_training

# Parameters that are float32 in a layer of any dtype.
_WIDE_IN_V4 = ("norm.weight", "sinks", "position_bias")


def relative_errors(
    config: MLAConfig | V4Config,
    lengths: Sequence[int],
    *,
    dense: bool,
    device: torch.device | str = "cpu",
    autocast: bool = False,
) -> dict[str, float]:
    """‖x - y‖ / ‖y‖ of the output, the indexer's loss and each gradient, with random weights and hidden states.

    The step in float32 runs on references, with the selection of the step in bf16, since the order of close scores may
    differ.

    Args:
        dense: attend to every token.
        autocast: bf16 by autocast over float32 parameters, which are those of the step in float32.
    """
    generator = torch.Generator(device).manual_seed(0)
    is_v4 = isinstance(config, V4Config)
    layer_class: Any = V4Attention if is_v4 else MLAAttention
    layer = layer_class(config, dtype=torch.float32, device=device).requires_grad_(True)
    for parameter in layer.parameters():
        shift = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data.normal_(shift, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
    half = layer if autocast else copy.deepcopy(layer).bfloat16()
    for name, parameter in half.named_parameters():
        if name.endswith(_WIDE_IN_V4 if is_v4 else "indexer.weights_proj.weight"):
            parameter.data = parameter.data.float()
    layer = copy.deepcopy(layer)
    for exact, rounded in zip(layer.parameters(), half.parameters(), strict=True):
        exact.data.copy_(rounded.data)
    hidden = torch.randn(sum(lengths), config.hidden_size, generator=generator, device=device).bfloat16()
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0)
    weights = torch.randn(hidden.shape, generator=generator, device=device)

    def step(module: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = hidden.clone().requires_grad_()
        result = module.forward_training(hidden, boundaries, max(lengths), dense=dense)
        found = {"out": result.out}
        total = (result.out.float() * weights).sum()
        if result.indexer_loss is not None:
            found["indexer_loss"] = result.indexer_loss
            total = total + result.indexer_loss
        total.backward()
        found |= {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
        assert hidden.grad is not None
        return {name: x.detach().double() for name, x in found.items()} | {"hidden": hidden.grad.double()}

    selected: list[torch.Tensor] = []
    host = v4_training if is_v4 else training
    select = training.select
    with mock.patch.object(host, "select", lambda *args: selected.append(select(*args)) or selected[0]):
        device_type = torch.device(device).type
        with torch.autocast(device_type, torch.bfloat16, enabled=autocast):
            results = step(half, hidden)
        exact = step(layer, hidden.float())
    assert results.keys() == exact.keys()
    return {name: ((results[name] - x).norm() / x.norm()).item() for name, x in exact.items()}
