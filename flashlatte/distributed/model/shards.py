"""A transformers decoder layer's parts, cut to what one rank of several has.

Float8 weights with the scales of their blocks are cut between blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from flashlatte.distributed.model.ranks import Ranks
from flashlatte.layers import MLAConfig, quantised

# Numbers of an MLP that stay together.
_PIECE = 8
# The axes of weights: outputs, inputs.
_ROWS, _COLUMNS = -2, -1


def check_divisible(model: nn.Module) -> None:
    """Raise ValueError for quantised weights that are not float8 with scales beside them (``FP8Linear``)."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            knows_itself = quantised.knows_itself(parameter)
            has_scales = parameter.is_floating_point() and hasattr(module, scales_name(name))
            if knows_itself or (parameter.dtype.itemsize == 1 and not has_scales):
                got = type(parameter).__name__ if knows_itself else parameter.dtype
                raise ValueError(
                    "tensor_parallel above 1 needs weights that are not quantised, or float8 with scales, got "
                    f"{module_name}.{name} of {got}"
                )


def keep_heads(config: MLAConfig, module: Any, ranks: Ranks) -> tuple[int, int]:
    """Leave a transformers attention layer this rank's heads: (first, end)."""
    heads = config.num_attention_heads
    if heads < ranks.size or (ranks.keys_over > 1 and heads % ranks.size):
        at_least = f"at least {ranks.size}" if ranks.keys_over == 1 else f"a multiple of {ranks.size}"
        raise ValueError(f"tensor_parallel {ranks.size} needs {at_least} heads, and the model has {heads}")
    first, end = ranks.share(heads)
    expansion = config.qk_nope_head_dim + config.v_head_dim
    query = module.q_proj if config.q_lora_rank is None else module.q_b_proj
    for linear, width in ((query, config.qk_head_dim), (module.kv_b_proj, expansion)):
        _keep_outputs(linear, first * width, end * width)
    _keep_inputs(module.o_proj, first * config.v_head_dim, end * config.v_head_dim, ranks)
    return first, end


def inner_share(ranks: Ranks, inner: int, piece: int = _PIECE) -> tuple[int, int]:
    """(first, end) of the inner numbers that this rank has of an MLP, or of each expert.

    Where there are enough, they are dealt in pieces: a product of all experts at a time wants rows that begin at
    multiples of 16 bytes, and a block of quantised ones stays whole.
    """
    pieces = inner // piece if inner % piece == 0 and inner // piece >= ranks.size else inner
    first, end = ranks.share(pieces)
    return first * inner // pieces, end * inner // pieces


def piece_of(module: Any) -> int:
    """The piece of a linear layer's, or of experts', inner numbers."""
    block = getattr(module, "block_size", None)
    return _PIECE if block is None else math.lcm(*block)


def scales_name(name: str) -> str:
    """transformers' name of what a quantised tensor is multiplied by; of those scales themselves, their own."""
    return f"{name.removesuffix('_scale_inv')}_scale_inv"


def divide_mlp(mlp: nn.Module, ranks: Ranks) -> None:
    """Leave an MLP, or a mixture of experts, this rank's part of every expert; its output stays what it was.

    Between the projections each number goes its own way, so ranks may have some of them, and the last projections' sum
    over the ranks is that of the whole. The router is on every rank.
    """

    def sum_output(module: nn.Module, arguments: Any, output: Any) -> torch.Tensor:
        return ranks.sum(output)

    parts = [module for module in mlp.modules() if hasattr(module, "down_proj")]
    for module in parts:
        _keep_share(module, ranks)
    # What is normalised must be whole before (A.X K1); else one sum does for experts and shared experts.
    is_linear = not any("norm" in name for name, _ in mlp.named_modules())
    for module in [mlp] if is_linear else parts:
        module.register_forward_hook(sum_output)


def _keep_share(module: Any, ranks: Ranks) -> None:
    if isinstance(module.down_proj, nn.Parameter):  # [experts, hidden, inner]
        first, end = inner_share(ranks, module.down_proj.shape[_COLUMNS], piece_of(module))
        # gate_up_proj [experts, 2 * inner, hidden] has two halves.
        _keep(module, "gate_up_proj", _ROWS, first, end, halves=2)
        _keep(module, "down_proj", _COLUMNS, first, end)
        module.intermediate_dim = end - first
        return
    first, end = inner_share(ranks, module.down_proj.in_features, piece_of(module.down_proj))
    for linear in (module.gate_proj, module.up_proj):
        _keep_outputs(linear, first, end)
    _keep_inputs(module.down_proj, first, end, ranks)


def _keep_outputs(linear: Any, first: int, end: int) -> None:
    _check_plain(linear)
    _keep(linear, "weight", _ROWS, first, end)
    linear.out_features = end - first
    if linear.bias is not None:
        linear.bias = _share(linear.bias.data, 0, first, end)


def _keep_inputs(linear: Any, first: int, end: int, ranks: Ranks) -> None:
    _check_plain(linear)
    _keep(linear, "weight", _COLUMNS, first, end)
    linear.in_features = end - first
    if not ranks.leads:
        linear.bias = None  # it is added once


def _check_plain(linear: Any) -> None:
    """Raise TypeError for a layer that may be more than its weight and bias, as an adapter is."""
    if type(linear) is not nn.Linear and not hasattr(linear, scales_name("weight")):
        raise TypeError(
            f"tensor_parallel above 1 needs plain linear layers, got {type(linear).__name__}: merge adapters first"
        )


def _keep(module: Any, name: str, axis: int, first: int, end: int, halves: int = 1) -> None:
    """Leave a weight [..., outputs, inputs] the numbers ``first`` to ``end`` of an axis, or of each of its halves."""
    weight = getattr(module, name).data
    setattr(module, name, _share(weight, axis, first, end, halves))
    scales, block = getattr(module, scales_name(name), None), getattr(module, "block_size", None)
    if scales is None or block is None:
        return  # one scale, of the whole
    size, block = weight.shape[axis] // halves, block[axis]
    if first % block or end % block or size % block:
        raise ValueError(
            f"tensor_parallel must divide quantised weights between their blocks of {block}, got {first} to {end} of "
            f"{size} for a rank's part of a {type(module).__name__}"
        )
    setattr(module, scales_name(name), _share(scales.data, axis, first // block, end // block, halves))


def _share(whole: torch.Tensor, axis: int, first: int, end: int, halves: int = 1) -> nn.Parameter:
    """A copy, so that what other ranks have can be forgotten."""
    parts = [half.narrow(axis, first, end - first) for half in whole.chunk(halves, axis)]
    return nn.Parameter(torch.cat(parts, axis), requires_grad=False)
