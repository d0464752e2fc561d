"""What a step's metadata brings where other ranks have some of the keys: how a layer comes to all of them."""

from __future__ import annotations

from typing import Protocol

import torch

from flashlatte.layers.cache import LatentCache


class DecodeOverRanks(Protocol):
    """Attention of the decode part over the keys of all ranks. Every method is a collective."""

    def attend(
        self, query: torch.Tensor, cache: LatentCache, softmax_scale: float, backend: str | None
    ) -> torch.Tensor:
        """Of queries [n, queries, h, head_dim] over all tokens up to their own: [n, queries, h, value_dim]."""
        ...

    def attend_selected(
        self, query: torch.Tensor, cache: LatentCache, slots: torch.Tensor, softmax_scale: float, backend: str | None
    ) -> torch.Tensor:
        """Of queries [T, h, head_dim] over what ``select`` returned for them: [T, h, value_dim]."""
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
        """The best tokens over all ranks, as slots of those that this rank has, then -1: int32 [n · queries, topk].

        Args:
            query: index queries [n, queries, H, head_dim]. weights: float32 [n · queries, H].
            pages: [pages, page_size, 1, width], this rank's index keys.
            logit_bytes: of index logits that may exist at once, at least one request's.
        """
        ...


class RowsOverRanks(Protocol):
    """Cached tokens of a chunk's requests, in order, from the ranks that have them. Every method is a collective."""

    def latents(self, cache: LatentCache, dtype: torch.dtype) -> torch.Tensor:
        """[tokens, head_dim]."""
        ...

    def index_keys(
        self, pages: torch.Tensor, head_dim: int, backend: str | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys and scales of all tokens, as ``index_gather`` returns them."""
        ...
