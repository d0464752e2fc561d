"""Slices the weights of linear layers and experts along outputs or inputs, with the scales of quantized weights.

Float8 weights have one scale for each two-dimensional block (transformers' ``FP8Linear`` and ``FP8Experts``). 4-bit
experts pack two elements into a byte and have one scale for 32 inputs of an output. Blocks are never split.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from flashlatte.distributed.model.ranks import Ranks
from flashlatte.layers import quantized
from flashlatte.layers.weights import has_custom_forward, has_hooks

# Axes of weights.
OUTPUTS, INPUTS = -2, -1
_MXFP4_BLOCK = {OUTPUTS: 1, INPUTS: 32}
# transformers' ``grouped_mm`` requires rows that are aligned to this number of bytes.
_ROW_ALIGNMENT = 16
# Granularity of the slices of an unquantized MLP's inner dim, which satisfies that alignment.
_MIN_SLICE = 8


def check_divisible(model: nn.Module) -> None:
    """Raise ValueError for weights in unsupported quantized formats."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_quantized_tensor = quantized.is_quantized_tensor(parameter)
            is_known = parameter.is_floating_point() or (parameter.dtype == torch.int8 and parameter.dim() == 3)
            has_scales = is_known and hasattr(module, scales_name(name))
            is_plain = parameter.is_floating_point() and parameter.dtype.itemsize > 1
            if is_quantized_tensor or not (is_plain or has_scales):
                got = type(parameter).__name__ if is_quantized_tensor else parameter.dtype
                raise ValueError(
                    "tensor_parallel above 1 needs weights that are not quantized, or in float8 with scales, got "
                    f"{module_name}.{name} of {got}"
                )


def scales_name(name: str) -> str:
    """transformers' name of the scales of a quantized tensor; the name itself for scales."""
    return f"{name.removesuffix('_scale_inv')}_scale_inv"


def min_slice(module: Any) -> int:
    """Granularity of slices of an MLP's or of experts' inner dim; ``module`` has the down projection."""
    block = getattr(module, "block_size", None)
    return _MIN_SLICE if block is None else math.lcm(*block)


def inner_size(experts: Any) -> int:
    """The inner dim of experts in one tensor, down_proj [experts, hidden, inner]."""
    return experts.down_proj.shape[INPUTS] * _elements_per_byte(experts.down_proj, INPUTS)


def check_no_custom_call(module: Any, *, allow_hooks: bool = False) -> None:
    """Raise TypeError for a module with hooks or a replaced forward, which would see only a rank's part of the data."""
    hooked = has_hooks(module) and not allow_hooks
    if hooked or has_custom_forward(module):
        got = "hooks" if hooked else "another forward"
        raise TypeError(
            f"tensor_parallel above 1 needs modules without hooks and replaced forwards, got {got} on a "
            f"{type(module).__name__}"
        )


def check_plain(linear: Any) -> None:
    """Raise TypeError for a layer that may have more parts than weight and bias, such as an adapter."""
    check_no_custom_call(linear)
    # DeepSeek-V4's o_a_proj has its own class, with n_groups.
    if type(linear) is nn.Linear or hasattr(linear, scales_name("weight")) or hasattr(linear, "n_groups"):
        return
    raise TypeError(
        f"tensor_parallel above 1 needs plain linear layers, got {type(linear).__name__}: merge adapters first"
    )


def check_rows(experts: Any, first: int, end: int) -> None:
    """Raise ValueError if ``grouped_mm`` does not support the slice ``first`` to ``end`` of the experts' inner dim."""
    is_grouped = getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"
    multiple = _ROW_ALIGNMENT // experts.down_proj.dtype.itemsize
    # Quantized blocks are aligned.
    in_blocks = _block(experts, experts.down_proj, INPUTS) is not None
    if is_grouped and not in_blocks and (end - first) % multiple:
        raise ValueError(
            f"tensor_parallel must give each rank a multiple of {multiple} inner dims of an expert, got {first} to "
            f"{end} of {inner_size(experts)}: use fewer ranks, or a model with experts_implementation='eager'"
        )


def keep_outputs(linear: Any, first: int, end: int) -> None:
    check_plain(linear)
    keep(linear, "weight", OUTPUTS, first, end)
    linear.out_features = end - first
    if linear.bias is not None:
        linear.bias = copy_slice(linear.bias.data, 0, first, end)


def keep_inputs(linear: Any, first: int, end: int, ranks: Ranks) -> None:
    check_plain(linear)
    keep(linear, "weight", INPUTS, first, end)
    linear.in_features = end - first
    if not ranks.is_leader:
        linear.bias = None  # only rank 0 adds it


def keep(module: Any, name: str, axis: int, first: int, end: int, halves: int = 1) -> None:
    """Slice a weight [..., outputs, inputs] to ``first`` to ``end`` - 1 of an axis, or of each half of it.

    Raises:
        ValueError: a bound within a block.
    """
    weight = getattr(module, name).data
    packed, block = _elements_per_byte(weight, axis), _block(module, weight, axis)
    size = weight.shape[axis] * packed // halves
    if block is not None:
        if first % block or end % block or size % block:
            raise ValueError(
                f"tensor_parallel must divide quantized weights at multiples of their block size {block}, got {first} "
                f"to {end} of {size} in a {type(module).__name__}"
            )
        scales = getattr(module, scales_name(name)).data
        setattr(module, scales_name(name), copy_slice(scales, axis, first // block, end // block, halves))
    setattr(module, name, copy_slice(weight, axis, first // packed, end // packed, halves))


def copy_slice(whole: torch.Tensor, axis: int, first: int, end: int, halves: int = 1) -> nn.Parameter:
    """A copied slice, so that the whole tensor can be freed."""
    parts = [half.narrow(axis, first, end - first) for half in whole.chunk(halves, axis)]
    return nn.Parameter(torch.cat(parts, axis), requires_grad=False)


def elements_per_entry(module: Any, name: str, axis: int) -> int:
    """Elements of a matrix along an axis for one entry of tensor ``name``, which may be a scale or a packed byte."""
    axis -= 2 if axis >= 0 else 0
    if name != scales_name(name):
        return _elements_per_byte(getattr(module, name), axis)
    return _block(module, getattr(module, name.removesuffix("_scale_inv")), axis) or 1


def _elements_per_byte(weight: torch.Tensor, axis: int) -> int:
    """Elements along an axis for one entry of the tensor."""
    return 2 if weight.dtype == torch.int8 and axis == INPUTS else 1


def _block(module: Any, weight: torch.Tensor, axis: int) -> int | None:
    """Elements along an axis that share a scale; None without blocks."""
    if weight.dtype == torch.int8:
        return _MXFP4_BLOCK[axis]
    block = getattr(module, "block_size", None)
    return None if block is None else block[axis]
