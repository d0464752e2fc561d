"""Uninitialized parameters of DeepSeek-V4.1's layers, with the same names as DeepSeek-V4's."""

from __future__ import annotations

import torch
from torch import nn

from flashlatte.layers.fused_projections import linear
from flashlatte.layers.v4.modules import NormWeight
from flashlatte.layers.v41.config import V41Config


class V41Compressor(nn.Module):
    """Projections that compress groups, in a layer that stores them, and the indexer, in a layer that selects.

    Groups of one token have no gate.
    """

    def __init__(self, config: V41Config, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        super().__init__()

        def project() -> nn.Linear:
            return linear(config.hidden_size, config.head_dim, dtype, device)

        self.kv_proj = project() if config.stores_groups else None
        self.gate_proj = project() if config.stores_groups and config.ratio > 1 else None
        self.kv_norm = NormWeight(config.head_dim, device) if config.stores_groups else None
        self.indexer = V41Indexer(config, dtype, device) if config.selects_groups else None


class V41Indexer(nn.Module):
    """Projections of index queries and head weights; and of groups to index keys, in a layer that stores groups."""

    def __init__(self, config: V41Config, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        super().__init__()
        sizes = config.indexer
        assert sizes is not None
        self.q_b_proj = linear(config.q_lora_rank, sizes.num_heads * sizes.head_dim, dtype, device)
        self.scorer = nn.Module()
        self.scorer.weights_proj = linear(config.hidden_size, sizes.num_heads, dtype, device)
        self.k_proj = linear(config.head_dim, sizes.head_dim, dtype, device) if config.stores_groups else None
        self.k_norm = NormWeight(sizes.head_dim, device) if config.stores_groups else None
