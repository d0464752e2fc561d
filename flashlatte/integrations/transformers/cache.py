"""The paged latent cache as a transformers ``Cache``. Importing this module imports transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from flashlatte.integrations.transformers.families import split_pairs
from flashlatte.integrations.transformers.indexer import stock_history
from flashlatte.integrations.transformers.padded import PagedLatents
from flashlatte.integrations.transformers.paged_cache import PagedCache, PagedLayer


class PagedLatentLayer(PagedLayer):
    is_sliding = False
    is_croppable = True


class PagedLatentCache(PagedCache):
    """A ``DynamicCache`` that stores latents in FlashLatte's pages, and transformers' states of linear attention.

    It implements the methods that ``generate`` calls: lengths, mask sizes, beam reordering, cropping, repeating and
    selecting requests. ``adopt`` converts a caller's empty ``DynamicCache`` in place. ``release`` converts it back to a
    ``DynamicCache`` with the same tokens, so that stock attention can continue with it; stock attention releases a
    paged cache that it is given.

    Attributes:
        splits_pairs: whether the stock cache stores the first rope dims of all pairs before the second ones, whereas
            pages store the two dims of a pair next to each other.
        filled_for: the config of the model that fills the cache.
    """

    store: PagedLatents
    layer_class = PagedLatentLayer
    splits_pairs: bool
    filled_for: Any

    @classmethod
    def adopt(
        cls, cache: DynamicCache, latents: PagedLatents, num_layers: int, splits_pairs: bool, config: Any
    ) -> PagedLatentCache:
        paged = cls._from_empty(cache, latents, num_layers)
        paged.splits_pairs, paged.filled_for = splits_pairs, config
        return paged

    def release(self) -> None:
        """Convert in place to a ``DynamicCache`` with the same tokens, dequantized. Hidden tokens are zeros."""
        layers = [
            _dynamic_layer(self.store, index, self.splits_pairs) if isinstance(layer, PagedLayer) else layer
            for index, layer in enumerate(self.layers)
        ]
        del self.store, self.splits_pairs, self.filled_for
        object.__setattr__(self, "__class__", DynamicCache)
        self.layers = layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Release the cache and update it. Only stock attention calls this, after the model was disabled.

        Raises:
            ValueError: stock attention caches keys of each head (DeepseekV32 and GlmMoeDsa in transformers 5.17).
        """
        if key_states.shape[1] != 1:
            raise ValueError(
                "the cache was filled by FlashLatte with latents, and stock attention of this transformers version "
                f"caches keys of each head, got {key_states.shape[1]} heads: pass an empty cache and all tokens"
            )
        self.release()
        return self.update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must be the number of tokens to remove as a negative int, got {tokens_to_remove}"
            )
        for _, layer in self.linear_layers:
            # It raises, unless it records past states.
            layer.crop(tokens_to_remove)
        self.store.drop_columns(-tokens_to_remove)


def _dynamic_layer(latents: PagedLatents, index: int, splits_pairs: bool) -> DynamicLayer:
    layer: Any = DynamicLayer()
    if latents.indexer is not None or latents.holds_column_states(index):
        from transformers.cache_utils import DynamicIndexedLayer

        layer = DynamicIndexedLayer()
        if latents.holds_index_keys(index):
            layer.update_indexer(stock_history(latents, index, latents.dtype, splits_pairs))
        if latents.holds_column_states(index):
            layer.update_indexer(latents.column_states(index))
    if latents.holds(index):
        rows = latents.read_history(index).unsqueeze(1)
        latent, rope = rows.split(latents.widths(index), dim=-1)
        if splits_pairs:
            rope = split_pairs(rope)
        layer.update(latent, rope)
    return layer
