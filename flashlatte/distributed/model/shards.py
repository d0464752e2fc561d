"""Partitions a transformers decoder layer for tensor parallelism: attention by heads, MLPs by inner dims."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flashlatte.distributed.model import partition
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.layers import MLAConfig
from flashlatte.layers.v4 import V4Config
from flashlatte.layers.weights import remove_accelerate_hooks


def copy_sharing_weights(model: Any) -> Any:
    """A copy of a transformers model that shares the weights' memory until ``move_weights``.

    Copying the whole model first could exceed the device's memory.
    """
    tensors = (*model.parameters(), *model.buffers())
    copied = copy.deepcopy(model, {id(tensor): _over_same_memory(tensor) for tensor in tensors})
    remove_accelerate_hooks(copied)
    return copied


def move_weights(model: nn.Module, device: torch.device | str, *, copies: bool) -> None:
    """Move a model's weights to a device one by one; with ``copies``, also copy those that are on it already."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(device, copy=copies)


def _over_same_memory(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach()
    return nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data


def keep_heads(config: MLAConfig, module: Any, ranks: Ranks) -> tuple[int, int]:
    """Slice a transformers attention layer to this rank's heads; returns (first, end)."""
    heads = config.num_attention_heads
    if heads < ranks.size or (ranks.kv_ranks > 1 and heads % ranks.size):
        at_least = f"at least {ranks.size}" if ranks.kv_ranks == 1 else f"a multiple of {ranks.size}"
        raise ValueError(f"tensor_parallel {ranks.size} needs {at_least} heads, and the model has {heads}")
    first, end = ranks.share(heads)
    expansion = config.qk_nope_head_dim + config.v_head_dim
    widths = {
        "q_proj": config.qk_head_dim,
        "q_b_proj": config.qk_head_dim,
        "q_gate_proj": config.qk_head_dim + config.v_head_dim,
        "g_proj": 1,
        "gate_proj": config.v_head_dim,
        "kv_b_proj": expansion,
    }
    for name, width in widths.items():
        # transformers sets the unused one of q_proj and q_b_proj to None.
        if (linear := getattr(module, name, None)) is not None:
            partition.keep_outputs(linear, first * width, end * width)
    if config.attn_sink:
        module.sinks = partition.copy_slice(module.sinks.data, 0, first, end)
    partition.keep_inputs(module.o_proj, first * config.v_head_dim, end * config.v_head_dim, ranks)
    return first, end


def keep_groups(config: V4Config, module: Any, ranks: Ranks) -> V4Config:
    """Slice transformers' DeepSeek-V4 attention to this rank's groups of heads; returns the rank's config."""
    groups = config.o_groups
    if groups < ranks.size:
        raise ValueError(f"tensor_parallel must be at most the model's {groups} groups of heads, got {ranks.size}")
    first, end = ranks.share(groups)
    heads = config.num_attention_heads // groups
    partition.keep_outputs(module.q_b_proj, first * heads * config.head_dim, end * heads * config.head_dim)
    module.sinks = partition.copy_slice(module.sinks.data, 0, first * heads, end * heads)
    partition.keep_outputs(module.o_a_proj, first * config.o_lora_rank, end * config.o_lora_rank)
    module.o_a_proj.n_groups = end - first
    partition.keep_inputs(module.o_b_proj, first * config.o_lora_rank, end * config.o_lora_rank, ranks)
    return dataclasses.replace(config, num_attention_heads=(end - first) * heads, o_groups=end - first)


def inner_range(ranks: Ranks, inner: int, granularity: int) -> tuple[int, int]:
    """(first, end) of this rank's inner dims of an MLP or of each expert; multiples of ``granularity`` if possible."""
    pieces = inner // granularity if inner % granularity == 0 and inner // granularity >= ranks.size else inner
    first, end = ranks.share(pieces)
    return first * inner // pieces, end * inner // pieces


def divide_mlp(mlp: nn.Module, ranks: Ranks) -> None:
    """Slice an MLP, or every expert of a mixture of experts, to this rank's inner dims; the output stays the same.

    The activation is elementwise, so inner dims can be divided, and the sum of the ranks' down projections is the
    output. The router is replicated.
    """

    def sum_output(module: nn.Module, arguments: Any, output: Any) -> torch.Tensor:
        return ranks.sum(output)

    partition.check_no_custom_call(mlp, allow_hooks=True)
    # Look at registered modules only: a wrapper may expose the projections of the module that it wraps.
    parts = [module for module in mlp.modules() if "down_proj" in {**module._modules, **module._parameters}]
    _check_known(mlp, parts)
    for module in parts:
        partition.check_no_custom_call(module, allow_hooks=module is mlp)
        _keep_slice(module, ranks)
    # A norm needs the complete sum of its input (A.X K1). Otherwise one sum covers experts and shared experts.
    is_linear = not any("norm" in name for name, _ in mlp.named_modules())
    for module in [mlp] if is_linear else parts:
        module.register_forward_hook(sum_output, prepend=True)


def _check_known(mlp: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Raise TypeError for weights that are neither divided nor of a router or norm: every rank would add their part."""
    known = set[nn.Module | None]()
    for part in parts:
        linears = (part._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj"))
        known |= {part} if "down_proj" in part._parameters else {*linears}
    for name, module in mlp.named_modules():
        is_whole = name.split(".")[0] == "gate" or "norm" in name
        if module not in known and not is_whole and any(True for _ in module.parameters(recurse=False)):
            raise TypeError(
                "tensor_parallel above 1 needs MLPs of a router, experts, and gate_proj, up_proj and down_proj, got "
                f"weights of {f'{name}, ' if name else ''}a {type(module).__name__}: merge adapters first"
            )


def _keep_slice(module: Any, ranks: Ranks) -> None:
    if isinstance(module.down_proj, nn.Parameter):  # [experts, hidden, inner]
        first, end = inner_range(ranks, partition.inner_size(module), partition.min_slice(module))
        partition.check_rows(module, first, end)
        # gate_up_proj [experts, 2 * inner, hidden] has two halves.
        partition.keep(module, "gate_up_proj", partition.OUTPUTS, first, end, halves=2)
        partition.keep(module, "down_proj", partition.INPUTS, first, end)
        module.intermediate_dim = end - first
        return
    partition.check_plain(module.down_proj)
    first, end = inner_range(ranks, module.down_proj.in_features, partition.min_slice(module.down_proj))
    for linear in (module.gate_proj, module.up_proj):
        partition.keep_outputs(linear, first, end)
    partition.keep_inputs(module.down_proj, first, end, ranks)
