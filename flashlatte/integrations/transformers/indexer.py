"""Index keys in pages for models with an indexer (DeepseekV32, GlmMoeDsa)."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.integrations.transformers.calls import CACHE
from flashlatte.integrations.transformers.families import join_pairs, split_pairs
from flashlatte.integrations.transformers.padded import PagedLatents
from flashlatte.kv_cache import CacheFormat, get_format
from flashlatte.kv_cache.index_formats import INDEX_FORMATS, IndexFormat, index_format_beside
from flashlatte.layers import IndexerConfig, models
from flashlatte.layers.indexer import StepIndexer, make_step_indexer
from flashlatte.layers.parts import source_layer
from flashlatte.ops.norm_rope import Rotary


def index_layout(name: str | None, latents: CacheFormat, indexer: IndexerConfig | None) -> CacheFormat | None:
    """The format of a model's index keys; None for a model without an indexer.

    Raises:
        ValueError: not an index format; a format for a model without an indexer; a latent format that cannot be read
            token by token.
    """
    if indexer is None:
        if name is not None:
            raise ValueError(f"index_format belongs to models with an indexer, got {name!r}")
        return None
    if latents.takes_scale:
        raise ValueError(
            f"cache_format {latents.name!r} cannot be read token by token, which the model's indexer requires"
        )
    layout = get_format(name or index_format_beside(latents), indexer.head_dim)
    if not isinstance(layout, IndexFormat):
        raise ValueError(f"index_format must be {', '.join(INDEX_FORMATS)} or None, got {name!r}")
    return layout


def step_indexer(
    module: Any, latents: PagedLatents, rotary: Rotary, device: torch.device, positions: torch.Tensor | None
) -> StepIndexer | None:
    """The module's indexer bound to the planned step; None if the module reuses a selection, or has no indexer."""
    if latents.indexer is None or module.indexer is None:
        return None
    pages, index_pages = (latents.pages(source_layer(module), device), latents.index_pages(module.layer_idx, device))
    return make_step_indexer(module.indexer, latents.indexer, index_pages, pages, rotary, latents.backend, positions)


class StockIndexKeys:
    """Cache argument of the stock indexer, which selects under a mask; it stores keys in pages and reads them back.

    Args:
        splits_pairs: as in ``PagedLatentCache``.
    """

    def __init__(self, latents: PagedLatents, splits_pairs: bool) -> None:
        self.latents, self.splits_pairs = latents, splits_pairs

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Store new keys [b, queries, head_dim]; returns the keys of all columns, the new ones unrounded."""
        latents = self.latents
        history = stock_history(latents, layer, keys.dtype, self.splits_pairs) if latents.columns else None
        latents.write_index_keys(layer, _paired(keys, latents, layer, self.splits_pairs))
        return keys if history is None else torch.cat((history, keys), dim=1)


def stock_history(latents: PagedLatents, layer: int, dtype: torch.dtype, splits_pairs: bool) -> torch.Tensor:
    """A layer's index keys [b, columns, head_dim] in the layout of a stock cache."""
    indexer, rope_dim = _layout(latents, layer)
    keys = latents.read_index_history(layer).to(dtype)
    if splits_pairs and indexer.rope_layout == models.INTERLEAVED:
        keys = torch.cat((split_pairs(keys[..., :rope_dim]), keys[..., rope_dim:]), dim=-1)
    return keys.roll(-rope_dim, dims=-1) if indexer.rope_last else keys


def _paired(keys: torch.Tensor, latents: PagedLatents, layer: int, splits_pairs: bool) -> torch.Tensor:
    """Keys [b, queries, head_dim] of a stock cache's layout in that of pages, the inverse of ``stock_history``."""
    indexer, rope_dim = _layout(latents, layer)
    keys = keys.roll(rope_dim, dims=-1) if indexer.rope_last else keys
    if not splits_pairs or indexer.rope_layout != models.INTERLEAVED:
        return keys
    return torch.cat((join_pairs(keys[..., :rope_dim]), keys[..., rope_dim:]), dim=-1)


def _layout(latents: PagedLatents, layer: int) -> tuple[IndexerConfig, int]:
    """The indexer's config, and the number of rotated dims."""
    assert latents.indexer is not None
    return latents.indexer, latents.widths(layer)[1]


def select_under_mask(
    module: Any,
    hidden: torch.Tensor,
    q_latent: torch.Tensor | None,
    embeddings: Any,
    attention_mask: torch.Tensor,
    latents: PagedLatents,
    shared: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> torch.Tensor:
    """The stock indexer's selection of columns, int32 [b, s, topk], or the previous layer's ``shared`` selection."""
    if module.indexer is None:
        if shared is None:
            raise ValueError(f"layer {module.layer_idx} needs the selection of the layer before it, got None")
        return shared
    keys = StockIndexKeys(latents, module.family.splits_pairs(module.config))
    inputs = (hidden,) if q_latent is None else (hidden, q_latent)
    return module.indexer(*inputs, embeddings, attention_mask[:, 0], position_ids, **{CACHE: keys})


def mask_unselected(attention_mask: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """Hide the columns that were not selected in a mask [b, 1, s, columns], as the stock models do."""
    hidden = torch.ones_like(attention_mask[:, 0], dtype=torch.bool).scatter(-1, selected.long(), False).unsqueeze(1)
    if attention_mask.dtype == torch.bool:
        return attention_mask & ~hidden
    return attention_mask.masked_fill(hidden, torch.finfo(attention_mask.dtype).min)
