"""The dequantized matrix of a quantized linear layer, and when it is recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flashlatte.layers.quantized import dequantized_weight

INPUTS, OUTPUTS = 6, 4


class Quantized(torch.Tensor):
    """A weight subclass of codes and a scale that supports matrix products, like torchao's tensors."""

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor, *_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, act_pre_scale: torch.Tensor | None = None) -> None:
        self.codes, self.scale, self.act_pre_scale = codes, scale, act_pre_scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        names = ["codes", "scale", "act_pre_scale"]
        return [name for name in names if getattr(self, name) is not None], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: Any) -> Quantized:
        return cls(**parts)

    def numbers(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight = args[:2]
            x = x if weight.act_pre_scale is None else x * weight.act_pre_scale
            return nn.functional.linear(x, weight.numbers().to(x.dtype))
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (weight,) = args
            return cls(weight.codes, weight.scale, weight.act_pre_scale)
        raise NotImplementedError(f"{function} of quantized weights")


class Dequantizable(Quantized):
    def dequantize(self) -> torch.Tensor:
        # Like torchao's, it omits the factor of the layer's input.
        return self.numbers()


def powers_of_two(*shape: int) -> torch.Tensor:
    """Scales with which products of small integers, and their sums in any order, are exact."""
    return 2.0 ** torch.randint(-3, 4, shape)


def layer_of(kind: type[Quantized], act_pre_scale: torch.Tensor | None = None) -> nn.Linear:
    codes = torch.randint(-100, 100, (OUTPUTS, INPUTS), dtype=torch.int8)
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    layer.weight = nn.Parameter(kind(codes, powers_of_two(OUTPUTS, 1), act_pre_scale), requires_grad=False)
    return layer


def assert_is_its_matrix(layer: nn.Linear) -> None:
    x = torch.randint(-9, 10, (3, INPUTS)).float()
    torch.testing.assert_close(x @ dequantized_weight(layer, torch.float32).T, layer(x), rtol=0, atol=0)


class Bytes(nn.Linear):
    """A layer with e4m3 weights, like transformers' ``FP8Linear``."""

    def __init__(self, codes: torch.Tensor) -> None:
        super().__init__(INPUTS, OUTPUTS, bias=False)
        self.weight, self.block_size = nn.Parameter(codes, requires_grad=False), None
        self.weight_scale_inv = nn.Parameter(torch.ones(()), requires_grad=False)


@pytest.mark.parametrize("kind", [Dequantizable, Quantized])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_factor_of_the_input_is_part_of_the_matrix(kind: type[Quantized], scaled: bool) -> None:
    assert_is_its_matrix(layer_of(kind, powers_of_two(INPUTS) if scaled else None))


@pytest.mark.parametrize("name", ["codes", "scale", "act_pre_scale"])
def test_a_weight_whose_part_changed_is_read_again(name: str) -> None:
    layer = layer_of(Dequantizable, torch.ones(INPUTS))
    before = dequantized_weight(layer, torch.float32)
    assert dequantized_weight(layer, torch.float32) is before
    getattr(layer.weight, name).neg_()
    torch.testing.assert_close(dequantized_weight(layer, torch.float32), -before, rtol=0, atol=0)


def test_a_replaced_weight_is_read_again() -> None:
    layer, other = layer_of(Dequantizable), layer_of(Dequantizable)
    dequantized_weight(layer, torch.float32)
    torch.utils.swap_tensors(layer.weight, other.weight)
    assert_is_its_matrix(layer)


def test_a_new_weight_in_reused_memory_is_read() -> None:
    # As if weights are freed while idle, and restored with other values.
    memory = bytearray(INPUTS * OUTPUTS)

    def codes(number: int) -> torch.Tensor:
        memory[:] = [number] * len(memory)
        return torch.frombuffer(memory, dtype=torch.float8_e4m3fn).view(OUTPUTS, INPUTS)

    layer = Bytes(codes(0x38))
    assert dequantized_weight(layer, torch.float32).eq(1).all()
    layer.weight.data = codes(0x40)
    assert dequantized_weight(layer, torch.float32).eq(2).all()


@pytest.mark.parametrize("scale", [0.001, 0.3])
def test_a_layer_with_a_static_input_scale_is_refused(scale: float) -> None:
    class Static(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear((input / scale).round().clamp(-128, 127) * scale, self.weight.float())

    layer = Static(INPUTS, OUTPUTS, bias=False)
    layer.weight = nn.Parameter(torch.full((OUTPUTS, INPUTS), 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"^a quantized Static must be a linear map, got one that quantizes its input"):
        dequantized_weight(layer, torch.float32)
