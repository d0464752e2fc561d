"""The paged latent cache as transformers' ``Cache``. Importing this module imports transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from flashlatte.integrations.transformers.indexed import stock_history
from flashlatte.integrations.transformers.padded import PagedLatents
from flashlatte.integrations.transformers.paged_cache import PagedCache, PagedLayer


class PagedLatentLayer(PagedLayer):
    is_sliding = False
    is_croppable = True


class PagedLatentCache(PagedCache):
    """A ``DynamicCache`` whose layers lie in FlashLatte's pages.

    It answers what ``generate`` asks a cache: lengths, mask sizes, beam reordering, cropping, repeating and
    selecting requests. ``adopt`` turns a caller's empty ``DynamicCache`` into one, the object staying the same, and
    ``release`` turns it back into a ``DynamicCache`` that holds the same tokens, so that stock attention can go on
    with it. Stock attention that is given a paged cache releases it.

    Attributes:
        parts_pairs: whether the stock cache holds the first rope dims of all pairs before the second ones, where a
            stored row has the two of a pair side by side.
        filled_for: the config of the model that fills it.
    """

    store: PagedLatents
    layer_class = PagedLatentLayer
    parts_pairs: bool
    filled_for: Any

    @classmethod
    def adopt(
        cls, cache: DynamicCache, latents: PagedLatents, num_layers: int, parts_pairs: bool, config: Any
    ) -> PagedLatentCache:
        paged = cls._made_of(cache, latents, num_layers)
        paged.parts_pairs, paged.filled_for = parts_pairs, config
        return paged

    def release(self) -> None:
        """Become a ``DynamicCache`` with the same tokens, dequantised, in place. Hidden tokens are zeros."""
        layers = [_dynamic_layer(self.store, index, self.parts_pairs) for index in range(len(self.layers))]
        del self.store, self.parts_pairs, self.filled_for
        object.__setattr__(self, "__class__", DynamicCache)
        self.layers = layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only stock attention calls this, when the model was disabled: it gets the cache it knows.

        Raises:
            ValueError: it caches keys of each head, as that of DeepseekV32 and GlmMoeDsa did in transformers 5.17.
        """
        if key_states.shape[1] != 1:
            raise ValueError(
                "the cache was filled by FlashLatte with latents, and stock attention of this transformers "
                f"caches keys of each head, here {key_states.shape[1]}: give it an empty cache and all tokens"
            )
        self.release()
        return self.update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must be the number of tokens to remove as a negative int, got {tokens_to_remove}"
            )
        self.store.drop_columns(-tokens_to_remove)


def _dynamic_layer(latents: PagedLatents, index: int, parts_pairs: bool) -> DynamicLayer:
    layer: Any = DynamicLayer()
    if latents.indexer is not None:
        from transformers.cache_utils import DynamicIndexedLayer

        layer = DynamicIndexedLayer()
        if latents.holds_index_keys(index):
            layer.update_indexer(stock_history(latents, index, latents.dtype))
    if latents.holds(index):
        rows = latents.read_history(index).unsqueeze(1)
        latent, rope = rows[..., : latents.latent_dim], rows[..., latents.latent_dim :]
        if parts_pairs:
            rope = rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        layer.update(latent, rope)
    return layer
