"""Weights of linear layers and experts, cut to some of their outputs or inputs, with their scales if quantised.

Float8 weights have a scale for each block of both, as DeepSeek's checkpoints do (transformers' ``FP8Linear`` and
``FP8Experts``); experts of four bits, two to a byte, one for 32 inputs of an output. Blocks stay whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from flashlatte.distributed.model.ranks import Ranks
from flashlatte.layers import quantised
from flashlatte.layers.weights import has_hooks, is_replaced

# The axes of weights.
OUTPUTS, INPUTS = -2, -1
_BLOCK_OF_FOUR_BITS = {OUTPUTS: 1, INPUTS: 32}
# A product of all experts at a time (transformers' ``grouped_mm``) wants rows that begin at multiples of so many bytes.
_ROW_BYTES = 16
# Numbers of an MLP that stay together where nothing is quantised, for that.
_PIECE = 8


def check_divisible(model: nn.Module) -> None:
    """Raise ValueError for weights that are quantised in another way."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            knows_itself = quantised.knows_itself(parameter)
            is_known = parameter.is_floating_point() or (parameter.dtype == torch.int8 and parameter.dim() == 3)
            has_scales = is_known and hasattr(module, scales_name(name))
            is_plain = parameter.is_floating_point() and parameter.dtype.itemsize > 1
            if knows_itself or not (is_plain or has_scales):
                got = type(parameter).__name__ if knows_itself else parameter.dtype
                raise ValueError(
                    "tensor_parallel above 1 needs weights that are not quantised, or in float8 with scales, got "
                    f"{module_name}.{name} of {got}"
                )


def scales_name(name: str) -> str:
    """transformers' name of what a quantised tensor is multiplied by; of those scales themselves, their own."""
    return f"{name.removesuffix('_scale_inv')}_scale_inv"


def piece_of(module: Any) -> int:
    """How many numbers of an MLP's, or of experts', inner ones stay together: ``module`` has their last projection."""
    block = getattr(module, "block_size", None)
    return _PIECE if block is None else math.lcm(*block)


def inner_size(experts: Any) -> int:
    """Inner numbers of experts in one tensor, down_proj [experts, hidden, inner]."""
    return experts.down_proj.shape[INPUTS] * _packed(experts.down_proj, INPUTS)


def check_unwatched(module: Any, hooks: bool = False) -> None:
    """Raise TypeError for a module whose call does more than its class's, which would see a rank's part of the numbers.

    Args:
        hooks: whether it may have hooks.
    """
    got = "hooks" if not hooks and has_hooks(module) else "another forward" if is_replaced(module) else None
    if got is not None:
        raise TypeError(
            f"tensor_parallel above 1 needs parts that are computed as their class says, as each rank has some of "
            f"their numbers, got {got} on a {type(module).__name__}"
        )


def check_plain(linear: Any) -> None:
    """Raise TypeError for a layer that may be more than its weight and bias, as an adapter is."""
    check_unwatched(linear)
    # DeepSeek-V4's o_a_proj has a class of its own.
    if type(linear) is nn.Linear or hasattr(linear, scales_name("weight")) or hasattr(linear, "n_groups"):
        return
    raise TypeError(
        f"tensor_parallel above 1 needs plain linear layers, got {type(linear).__name__}: merge adapters first"
    )


def check_rows(experts: Any, first: int, end: int) -> None:
    """Raise ValueError for inner numbers ``first`` to ``end`` of experts whose product would fail in the first step."""
    in_one_product = getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"
    each = _ROW_BYTES // experts.down_proj.dtype.itemsize
    # Whole blocks have as many.
    in_blocks = _block(experts, experts.down_proj, INPUTS) is not None
    if in_one_product and not in_blocks and (end - first) % each:
        raise ValueError(
            f"tensor_parallel must leave each rank a multiple of {each} inner numbers of an expert, got {first} to "
            f"{end} of {inner_size(experts)}: take fewer ranks, or a model with experts_implementation='eager'"
        )


def keep_outputs(linear: Any, first: int, end: int) -> None:
    check_plain(linear)
    keep(linear, "weight", OUTPUTS, first, end)
    linear.out_features = end - first
    if linear.bias is not None:
        linear.bias = share(linear.bias.data, 0, first, end)


def keep_inputs(linear: Any, first: int, end: int, ranks: Ranks) -> None:
    check_plain(linear)
    keep(linear, "weight", INPUTS, first, end)
    linear.in_features = end - first
    if not ranks.leads:
        linear.bias = None  # it is added once


def keep(module: Any, name: str, axis: int, first: int, end: int, halves: int = 1) -> None:
    """Leave a weight [..., outputs, inputs] the numbers ``first`` to ``end`` of an axis, or of each of its halves.

    Raises:
        ValueError: within a block.
    """
    weight = getattr(module, name).data
    packed, block = _packed(weight, axis), _block(module, weight, axis)
    size = weight.shape[axis] * packed // halves
    if block is not None:
        if first % block or end % block or size % block:
            raise ValueError(
                f"tensor_parallel must divide quantised weights between their blocks of {block}, got {first} to {end} "
                f"of {size} for a rank's part of a {type(module).__name__}"
            )
        scales = getattr(module, scales_name(name)).data
        setattr(module, scales_name(name), share(scales, axis, first // block, end // block, halves))
    setattr(module, name, share(weight, axis, first // packed, end // packed, halves))


def share(whole: torch.Tensor, axis: int, first: int, end: int, halves: int = 1) -> nn.Parameter:
    """A copy, so that what other ranks have can be forgotten."""
    parts = [half.narrow(axis, first, end - first) for half in whole.chunk(halves, axis)]
    return nn.Parameter(torch.cat(parts, axis), requires_grad=False)


def numbers_of_one(module: Any, name: str, axis: int) -> int:
    """Numbers of a matrix along an axis that one of the tensor ``name`` stands for: a scale of a block, or a byte."""
    axis -= 2 if axis >= 0 else 0
    if name != scales_name(name):
        return _packed(getattr(module, name), axis)
    return _block(module, getattr(module, name.removesuffix("_scale_inv")), axis) or 1


def _packed(weight: torch.Tensor, axis: int) -> int:
    """Numbers along an axis that are one of the tensor's."""
    return 2 if weight.dtype == torch.int8 and axis == INPUTS else 1


def _block(module: Any, weight: torch.Tensor, axis: int) -> int | None:
    """Numbers along an axis that have one scale; None: all."""
    if weight.dtype == torch.int8:
        return _BLOCK_OF_FOUR_BITS[axis]
    block = getattr(module, "block_size", None)
    return None if block is None else block[axis]
