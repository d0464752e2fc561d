"""Uninitialized parameters of DeepSeek-V4's layers, with transformers' names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from flashlatte.layers.fused_projections import fused_linear, linear
from flashlatte.layers.v4.config import V4Config, V4IndexerConfig
from flashlatte.layers.weights import linear_weight, norm_weight


class NormWeight(nn.Module):
    """The float32 weight of an RMSNorm."""

    def __init__(self, width: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32, device=device))


class V4Compressor(nn.Module):
    """Projections that compress groups to rows of ``head_dim``; twice as wide for each token if groups overlap."""

    def __init__(
        self, config: V4Config, head_dim: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        super().__init__()
        width = (1 + config.overlap) * head_dim
        self.kv_proj = linear(config.hidden_size, width, dtype, device)
        self.gate_proj = linear(config.hidden_size, width, dtype, device)
        self.position_bias = nn.Parameter(torch.empty(config.ratio, width, dtype=torch.float32, device=device))
        self.kv_norm = NormWeight(head_dim, device)


class LayerCompressor(V4Compressor):
    """The compressor of attention groups, and the indexer that selects among them."""

    def __init__(self, config: V4Config, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        super().__init__(config, config.head_dim, dtype, device)
        self.indexer = None if config.indexer is None else V4Indexer(config, config.indexer, dtype, device)


class V4Indexer(V4Compressor):
    """The indexer: a compressor of index keys, and projections of index queries and head weights."""

    def __init__(
        self, config: V4Config, sizes: V4IndexerConfig, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        super().__init__(config, sizes.head_dim, dtype, device)
        self.q_b_proj = linear(config.q_lora_rank, sizes.num_heads * sizes.head_dim, dtype, device)
        self.scorer = nn.Module()
        self.scorer.weights_proj = linear(config.hidden_size, sizes.num_heads, dtype, device)


class Projected(NamedTuple):
    """Results [T, any] of a layer's projections of hidden states; None for projections that the layer lacks."""

    q_latent: torch.Tensor
    kv: torch.Tensor
    group_kv: Any = None
    group_gate: Any = None
    index_kv: Any = None
    index_gate: Any = None
    index_weights: Any = None


def project_hidden(module: Any, config: V4Config, hidden: torch.Tensor) -> Projected:
    projections = _named_projections(module, config)
    return Projected(**dict(zip(projections, fused_linear(hidden, *projections.values()), strict=True)))


def hidden_projections(module: Any, config: V4Config) -> list[Any]:
    """The projections of hidden states, in the order of ``Projected``."""
    return list(_named_projections(module, config).values())


def _named_projections(module: Any, config: V4Config) -> dict[str, Any]:
    """The projections of hidden states by their name in ``Projected``."""
    projections = {"q_latent": module.q_a_proj, "kv": module.kv_proj}
    if config.stores_groups:
        projections["group_kv"] = module.compressor.kv_proj
        projections["group_gate"] = module.compressor.gate_proj
    if config.selects_groups:
        indexer = module.compressor.indexer
        if config.index_state_dim:
            projections["index_kv"], projections["index_gate"] = indexer.kv_proj, indexer.gate_proj
        projections["index_weights"] = indexer.scorer.weights_proj
    # V4.1 has no gate where a group is one token.
    return {name: projection for name, projection in projections.items() if projection is not None}


def output_matrix(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """o_a_proj's weight [o_groups · o_lora_rank, inputs of a group]; transformers uses a subclass of ``nn.Linear``."""
    return linear_weight(module, "o_a_proj", dtype, of_subclass=True)


def check_weights(module: Any, config: V4Config, dtype: torch.dtype) -> None:
    """Raise TypeError for a projection or norm whose weight cannot replace a call of the module, in ``dtype``."""
    output_matrix(module, dtype)
    norm_weight(module, "q_a_norm")
    norm_weight(module, "kv_norm")
    if config.ratio:
        norm_weight(module.compressor, "kv_norm")
    if config.indexer is not None:
        norm_weight(module.compressor.indexer, "kv_norm")
