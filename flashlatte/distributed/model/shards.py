"""A transformers decoder layer's parts, cut to what one rank of several has."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flashlatte.distributed.model import cuts
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.layers import MLAConfig
from flashlatte.layers.v4 import V4Config
from flashlatte.layers.weights import forget_devices


def copied(model: Any) -> Any:
    """A copy of a transformers model, to be cut and then to ``take``: until then its weights lie where the model's do.

    Two wholes may be more than a device holds.
    """
    tensors = (*model.parameters(), *model.buffers())
    made = copy.deepcopy(model, {id(tensor): _over_same_memory(tensor) for tensor in tensors})
    forget_devices(made)
    return made


def take(model: nn.Module, device: torch.device | str, *, copies: bool) -> None:
    """Bring a model's weights to a device, one after the other; ``copies``: even there, into memory of their own."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(device, copy=copies)


def _over_same_memory(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach()
    return nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data


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
        cuts.keep_outputs(linear, first * width, end * width)
    cuts.keep_inputs(module.o_proj, first * config.v_head_dim, end * config.v_head_dim, ranks)
    return first, end


def keep_groups(config: V4Config, module: Any, ranks: Ranks) -> V4Config:
    """Leave DeepSeek-V4's attention layer of transformers this rank's heads, whole groups of them; what it is then."""
    groups = config.o_groups
    if groups < ranks.size:
        raise ValueError(f"tensor_parallel {ranks.size} needs as many groups of heads, and the model has {groups}")
    first, end = ranks.share(groups)
    heads = config.num_attention_heads // groups
    cuts.keep_outputs(module.q_b_proj, first * heads * config.head_dim, end * heads * config.head_dim)
    module.sinks = cuts.share(module.sinks.data, 0, first * heads, end * heads)
    cuts.keep_outputs(module.o_a_proj, first * config.o_lora_rank, end * config.o_lora_rank)
    module.o_a_proj.n_groups = end - first
    cuts.keep_inputs(module.o_b_proj, first * config.o_lora_rank, end * config.o_lora_rank, ranks)
    return dataclasses.replace(config, num_attention_heads=(end - first) * heads, o_groups=end - first)


def inner_share(ranks: Ranks, inner: int, piece: int) -> tuple[int, int]:
    """(first, end) of the inner numbers that this rank has of an MLP, or of each expert.

    Where there are enough, they are dealt in pieces (``cuts.piece_of``).
    """
    pieces = inner // piece if inner % piece == 0 and inner // piece >= ranks.size else inner
    first, end = ranks.share(pieces)
    return first * inner // pieces, end * inner // pieces


def divide_mlp(mlp: nn.Module, ranks: Ranks) -> None:
    """Leave an MLP, or a mixture of experts, this rank's part of every expert; its output stays what it was.

    Between the projections each number goes its own way, so ranks may have some of them, and the last projections' sum
    over the ranks is that of the whole. The router is on every rank.
    """

    def sum_output(module: nn.Module, arguments: Any, output: Any) -> torch.Tensor:
        return ranks.sum(output)

    cuts.check_unwatched(mlp, hooks=True)
    # What wraps a part may show the part's projections as its own.
    parts = [module for module in mlp.modules() if "down_proj" in {**module._modules, **module._parameters}]
    _check_known(mlp, parts)
    for module in parts:
        cuts.check_unwatched(module, hooks=module is mlp)
        _keep_share(module, ranks)
    # What is normalised must be whole before (A.X K1); else one sum does for experts and shared experts.
    is_linear = not any("norm" in name for name, _ in mlp.named_modules())
    for module in [mlp] if is_linear else parts:
        module.register_forward_hook(sum_output, prepend=True)


def _check_known(mlp: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Raise TypeError for weights that are neither divided nor a router's or a norm's: every rank would add theirs."""
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


def _keep_share(module: Any, ranks: Ranks) -> None:
    if isinstance(module.down_proj, nn.Parameter):  # [experts, hidden, inner]
        first, end = inner_share(ranks, cuts.inner_size(module), cuts.piece_of(module))
        cuts.check_rows(module, first, end)
        # gate_up_proj [experts, 2 * inner, hidden] has two halves.
        cuts.keep(module, "gate_up_proj", cuts.OUTPUTS, first, end, halves=2)
        cuts.keep(module, "down_proj", cuts.INPUTS, first, end)
        module.intermediate_dim = end - first
        return
    cuts.check_plain(module.down_proj)
    first, end = inner_share(ranks, module.down_proj.in_features, cuts.piece_of(module.down_proj))
    for linear in (module.gate_proj, module.up_proj):
        cuts.keep_outputs(linear, first, end)
    cuts.keep_inputs(module.down_proj, first, end, ranks)
