"""Models whose attention has an indexer (DeepseekV32, GlmMoeDsa): their index keys beside the paged latents."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.integrations.transformers.calls import CACHE
from flashlatte.integrations.transformers.padded import PagedLatents
from flashlatte.kv_cache import CacheFormat, get_format
from flashlatte.kv_cache.index_formats import INDEX_FORMATS, IndexFormat, index_format_beside
from flashlatte.layers import IndexerConfig, models
from flashlatte.layers.indexer import Indexing, make_indexing
from flashlatte.ops.norm_rope.rotary import Rotary


def index_layout(name: str | None, latents: CacheFormat, indexer: IndexerConfig | None) -> CacheFormat | None:
    """The format of a model's index keys; None for a model without an indexer.

    Raises:
        ValueError: a format of something else, a format for a model without an indexer, or latents that an indexer's
            choice cannot be read from.
    """
    if indexer is None:
        if name is not None:
            raise ValueError(f"index_format belongs to models with an indexer, got {name!r}")
        return None
    if latents.takes_scale:
        raise ValueError(
            f"cache_format {latents.name!r} cannot be read token by token, as the model's indexer needs it"
        )
    layout = get_format(name or index_format_beside(latents), indexer.head_dim)
    if not isinstance(layout, IndexFormat):
        raise ValueError(f"index_format must be {', '.join(INDEX_FORMATS)} or None, got {name!r}")
    return layout


def indexing(module: Any, latents: PagedLatents, rotary: Rotary, device: torch.device) -> Indexing | None:
    """The module's indexer in the step that ``latents`` planned; None if it shares another's choice, or has none."""
    if latents.indexer is None or module.indexer is None:
        return None
    pages, index_pages = latents.pages(module.layer_idx, device), latents.index_pages(module.layer_idx, device)
    return make_indexing(module.indexer, latents.indexer, index_pages, pages, rotary, latents.backend)


class StockIndexKeys:
    """What the stock indexer takes for its cache, where it has to choose under a mask: keys go to pages and back."""

    def __init__(self, latents: PagedLatents) -> None:
        self.latents = latents

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Store new keys [b, queries, head_dim]; returns those of all columns, the new ones as they are."""
        latents = self.latents
        history = stock_history(latents, layer, keys.dtype) if latents.columns else None
        latents.write_index_keys(layer, _paired(keys, latents))
        return keys if history is None else torch.cat((history, keys), dim=1)


def stock_history(latents: PagedLatents, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """A layer's index keys [b, columns, head_dim] as a stock cache holds them."""
    keys = latents.read_index_history(layer).to(dtype)
    return _turned(keys, latents, lambda rope: rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))


def _paired(keys: torch.Tensor, latents: PagedLatents) -> torch.Tensor:
    return _turned(keys, latents, lambda rope: rope.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))


def _turned(keys: torch.Tensor, latents: PagedLatents, order: Any) -> torch.Tensor:
    """The stock models that rotate neighbours put the first dims of all pairs before the second ones."""
    assert latents.indexer is not None
    if latents.indexer.rope_layout != models.INTERLEAVED:
        return keys
    rope_dim = latents.layout.head_dim - latents.latent_dim
    return torch.cat((order(keys[..., :rope_dim]), keys[..., rope_dim:]), dim=-1)


def choose_under_mask(
    module: Any,
    hidden: torch.Tensor,
    q_latent: torch.Tensor,
    embeddings: Any,
    attention_mask: torch.Tensor,
    latents: PagedLatents,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """The stock indexer's choice, int32 [b, s, topk] of columns, or the ``shared`` one of a layer before."""
    if module.indexer is None:
        if shared is None:
            raise ValueError(f"layer {module.layer_idx} shares its choice of tokens with a layer before it, got none")
        return shared
    keys = StockIndexKeys(latents)
    return module.indexer(hidden, q_latent, embeddings, attention_mask[:, 0], None, **{CACHE: keys})


def with_choice(attention_mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The mask [b, 1, s, columns] without the columns that were not chosen, as the stock models make it."""
    hidden = torch.ones_like(attention_mask[:, 0], dtype=torch.bool).scatter(-1, chosen.long(), False).unsqueeze(1)
    if attention_mask.dtype == torch.bool:
        return attention_mask & ~hidden
    return attention_mask.masked_fill(hidden, torch.finfo(attention_mask.dtype).min)
