"""A transformers decoder layer's parts, cut to what one rank of several has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashlatte.distributed.model.ranks import Ranks
from flashlatte.layers import MLAAttention, MLAConfig, quantised

# Numbers of an MLP that stay together.
_PIECE = 8


def check_divisible(model: nn.Module) -> None:
    """Raise ValueError for quantised weights, whose scales are of more rows and columns than a rank may have."""
    for name, parameter in model.named_parameters():
        knows_itself = quantised.knows_itself(parameter)
        if knows_itself or parameter.dtype.itemsize == 1:
            got = type(parameter).__name__ if knows_itself else parameter.dtype
            raise ValueError(f"tensor_parallel above 1 needs weights that are not quantised, got {name} of {got}")


def own_heads(config: MLAConfig, module: nn.Module, ranks: Ranks, **options: Any) -> MLAAttention:
    """This rank's heads of an attention layer, with copies of a transformers module's weights."""
    heads = config.num_attention_heads
    if heads < ranks.size or (ranks.keys_over > 1 and heads % ranks.size):
        at_least = f"at least {ranks.size}" if ranks.keys_over == 1 else f"a multiple of {ranks.size}"
        raise ValueError(f"tensor_parallel {ranks.size} needs {at_least} heads, and the model has {heads}")
    weight = module.state_dict()["o_proj.weight"]
    attention = MLAAttention(config, heads=ranks.share(heads), dtype=weight.dtype, device=weight.device, **options)
    attention.load_weights(module.state_dict())
    return attention


def inner_share(ranks: Ranks, inner: int) -> tuple[int, int]:
    """(first, end) of the inner numbers that this rank has of an MLP, or of each expert.

    Where there are enough, they are dealt in eights: a product of all experts at a time wants rows that begin at
    multiples of 16 bytes.
    """
    pieces = inner // _PIECE if inner % _PIECE == 0 and inner // _PIECE >= ranks.size else inner
    first, end = ranks.share(pieces)
    return first * inner // pieces, end * inner // pieces


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
        first, end = inner_share(ranks, module.down_proj.shape[2])
        halves = module.gate_up_proj.data.chunk(2, dim=1)  # each [experts, inner, hidden]
        module.gate_up_proj = _parameter(torch.cat([half[:, first:end] for half in halves], dim=1))
        module.down_proj = _parameter(module.down_proj.data[:, :, first:end])
        module.intermediate_dim = end - first
        return
    first, end = inner_share(ranks, module.down_proj.in_features)
    for linear in (module.gate_proj, module.up_proj):
        linear.weight, linear.out_features = _parameter(linear.weight.data[first:end]), end - first
        if linear.bias is not None:
            linear.bias = _parameter(linear.bias.data[first:end])
    down = module.down_proj
    down.weight, down.in_features = _parameter(down.weight.data[:, first:end]), end - first
    if not ranks.leads:
        down.bias = None  # it is added once


def _parameter(values: torch.Tensor) -> nn.Parameter:
    """A copy, so that what other ranks have can be forgotten."""
    return nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=False)
