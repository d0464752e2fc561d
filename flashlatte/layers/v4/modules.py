"""Parameters of DeepSeek-V4's layers, under transformers' names. None of them is initialised."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from flashlatte.layers.products import linear
from flashlatte.layers.side_by_side import products_of
from flashlatte.layers.v4.config import V4Config, V4IndexerConfig
from flashlatte.layers.weights import own_matrix, own_weight


class NormWeight(nn.Module):
    """The float32 weight of an RMSNorm."""

    def __init__(self, width: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32, device=device))


class Compressor(nn.Module):
    """What makes rows of groups: ``head_dim`` wide, from twice as many numbers a token where groups overlap."""

    def __init__(
        self,
        config: V4Config,
        head_dim: int,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        width = (1 + config.overlap) * head_dim
        self.kv_proj = linear(config.hidden_size, width, dtype, device)
        self.gate_proj = linear(config.hidden_size, width, dtype, device)
        self.position_bias = nn.Parameter(torch.empty(config.ratio, width, dtype=torch.float32, device=device))
        self.kv_norm = NormWeight(head_dim, device)


class LayerCompressor(Compressor):
    """The compressor of attention's groups, and the indexer that selects among them."""

    def __init__(self, config: V4Config, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        super().__init__(config, config.head_dim, dtype, device)
        self.indexer = None if config.indexer is None else Indexer(config, config.indexer, dtype, device)


class Indexer(Compressor):
    """The indexer: a compressor of its own keys, and its queries."""

    def __init__(
        self, config: V4Config, sizes: V4IndexerConfig, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        super().__init__(config, sizes.head_dim, dtype, device)
        self.q_b_proj = linear(config.q_lora_rank, sizes.num_heads * sizes.head_dim, dtype, device)
        self.scorer = nn.Module()
        self.scorer.weights_proj = linear(config.hidden_size, sizes.num_heads, dtype, device)


class Projected(NamedTuple):
    """What a layer's projections make of hidden states [T, hidden_size]: tensors [T, any], None of what it has not."""

    q_latent: torch.Tensor
    kv: torch.Tensor
    group_kv: Any = None
    group_gate: Any = None
    index_kv: Any = None
    index_gate: Any = None
    index_weights: Any = None


def project_hidden(module: Any, config: V4Config, hidden: torch.Tensor) -> Projected:
    return Projected(*products_of(hidden, *hidden_projections(module, config)))


def hidden_projections(module: Any, config: V4Config) -> list[Any]:
    """In the order of ``Projected``."""
    found = [module.q_a_proj, module.kv_proj]
    if config.ratio:
        found += [module.compressor.kv_proj, module.compressor.gate_proj]
    if config.indexer is not None:
        indexer = module.compressor.indexer
        found += [indexer.kv_proj, indexer.gate_proj, indexer.scorer.weights_proj]
    return found


def output_matrix(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """o_a_proj's weight [o_groups · o_lora_rank, inputs of a group]: in transformers of a class of its own."""
    return own_matrix(module, "o_a_proj", dtype, of_subclass=True)


def check_weights(module: Any, config: V4Config, dtype: torch.dtype) -> None:
    """Raise TypeError for a projection or norm whose weight cannot be read in place of a call, in ``dtype``."""
    output_matrix(module, dtype)
    own_weight(module, "q_a_norm")
    own_weight(module, "kv_norm")
    if config.ratio:
        own_weight(module.compressor, "kv_norm")
    if config.indexer is not None:
        own_weight(module.compressor.indexer, "kv_norm")
