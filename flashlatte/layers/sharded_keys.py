"""Protocols by which a step's metadata provides the keys of other ranks, if keys are sharded over ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from flashlatte.layers.cache import LatentCache


class ShardedDecode(Protocol):
    """Attention of the decode part over the keys of all ranks. Every method is a collective operation."""

    def attend(
        self, query: torch.Tensor, cache: LatentCache, softmax_scale: float, backend: str | None
    ) -> torch.Tensor:
        """Causal attention of queries [n, queries, h, head_dim] over all tokens: [n, queries, h, value_dim]."""
        ...

    def attend_selected(
        self, query: torch.Tensor, cache: LatentCache, slots: torch.Tensor, softmax_scale: float, backend: str | None
    ) -> torch.Tensor:
        """Attention of queries [T, h, head_dim] over the slots that ``select`` returned: [T, h, value_dim]."""
        ...

    def select(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        weights: torch.Tensor,
        topk: int,
        logit_bytes: int,
        backend: str | None,
    ) -> torch.Tensor:
        """The global top-k tokens, as the slots of those on this rank, then -1: int32 [n · queries, topk].

        Args:
            query: index queries [n, queries, H, head_dim].
            pages: [pages, page_size, 1, width], this rank's index keys.
            weights: float32 [n · queries, H].
            logit_bytes: limit on the index logits allocated at once, at least those of one request.
        """
        ...


class ShardedRows(Protocol):
    """Cached tokens of a chunk, in order, gathered from all ranks. Every method is a collective operation."""

    def latents(self, cache: LatentCache, dtype: torch.dtype) -> torch.Tensor:
        """Latent rows [tokens, head_dim]."""
        ...

    def index_keys(
        self, pages: torch.Tensor, head_dim: int, backend: str | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Index keys and scales of all tokens, as ``index_gather`` returns them."""
        ...
