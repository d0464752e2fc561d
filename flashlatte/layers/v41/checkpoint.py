"""Loads the weights of a DeepSeek-V4.1 layer by the names of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from flashlatte.layers.quantized import apply_block_scales

# The names below ``layers.N.attn.`` that vLLM 0.33 reads, by the name of the parameter here.
NAMES = {
    "q_a_proj.weight": "wq_a.weight",
    "q_a_norm.weight": "q_norm.weight",
    "q_b_proj.weight": "wq_b.weight",
    "kv_proj.weight": "wkv.weight",
    "kv_norm.weight": "kv_norm.weight",
    "o_a_proj.weight": "wo_a.weight",
    "o_b_proj.weight": "wo_b.weight",
    "sinks": "attn_sink",
    "compressor.kv_proj.weight": "compressor.wkv.weight",
    "compressor.gate_proj.weight": "compressor.wgate.weight",
    "compressor.kv_norm.weight": "compressor.norm.weight",
    "compressor.indexer.q_b_proj.weight": "indexer.wq_b.weight",
    "compressor.indexer.scorer.weights_proj.weight": "indexer.weights_proj.weight",
    "compressor.indexer.k_proj.weight": "indexer.wk.weight",
    "compressor.indexer.k_norm.weight": "indexer.k_norm.weight",
}


@torch.no_grad()
def load_weights(module: nn.Module, weights: Mapping[str, torch.Tensor], block_size: tuple[int, int]) -> None:
    """Copy a layer's weights into its parameters; see ``V41Attention.load_weights``."""
    targets = {NAMES[name]: parameter for name, parameter in module.named_parameters()}
    if missing := [name for name in targets if name not in weights]:
        raise ValueError(f"weights must have {', '.join(missing)}, got {', '.join(sorted(weights)) or 'nothing'}")
    scales = {name: _scale_name(name) for name in targets if weights[name].dtype.itemsize == 1}
    if unknown := sorted(set(weights) - set(targets) - set(scales.values())):
        raise ValueError(f"weights must not have {', '.join(unknown)}, which the layer does not use")
    ready = {}
    for name, target in targets.items():
        weight = weights[name]
        if weight.shape != target.shape:
            raise ValueError(f"{name} must have shape {list(target.shape)}, got {list(weight.shape)}")
        if name in scales:
            scale = weights.get(scales[name])
            blocks = [-(-size // block) for size, block in zip(weight.shape, block_size, strict=True)]
            if scale is None or list(scale.shape) != blocks:
                got = "none" if scale is None else list(scale.shape)
                raise ValueError(f"{scales[name]} must have shape {blocks} for blocks of {list(block_size)}, got {got}")
            weight = apply_block_scales(weight, scale, block_size)
        ready[name] = weight
    for name, weight in ready.items():
        targets[name].copy_(weight)


def _scale_name(name: str) -> str:
    return name.removesuffix("weight") + "scale"
