"""The paged latent cache as transformers' ``Cache``. Importing this module imports transformers."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from flashlatte.integrations.transformers.indexed import stock_history
from flashlatte.integrations.transformers.padded import PagedLatents


class PagedLatentCache(DynamicCache):
    """A ``DynamicCache`` whose layers lie in FlashLatte's pages.

    It answers what ``generate`` asks a cache: lengths, mask sizes, beam reordering, cropping, repeating and
    selecting requests. ``adopt`` turns a caller's empty ``DynamicCache`` into one, the object staying the same, and
    ``release`` turns it back into a ``DynamicCache`` that holds the same tokens, so that stock attention can go on
    with it. Stock attention that is given a paged cache releases it.

    Attributes:
        latents: the pages and their bookkeeping.
        parts_pairs: whether the stock cache holds the first rope dims of all pairs before the second ones, where a
            stored row has the two of a pair side by side.
    """

    latents: PagedLatents
    parts_pairs: bool

    @staticmethod
    def adopt(cache: DynamicCache, latents: PagedLatents, num_layers: int, parts_pairs: bool) -> PagedLatentCache:
        """Make an empty ``DynamicCache`` paged, in place: whoever made it will look into it for the tokens."""
        object.__setattr__(cache, "__class__", PagedLatentCache)
        paged = cast(PagedLatentCache, cache)
        paged.latents = latents
        paged.parts_pairs = parts_pairs
        paged.layers = [PagedLatentLayer(latents) for _ in range(num_layers)]
        paged.layer_class_to_replicate = None
        return paged

    def release(self) -> None:
        """Become a ``DynamicCache`` with the same tokens, dequantised, in place. Hidden tokens are zeros."""
        layers = [_dynamic_layer(self.latents, index, self.parts_pairs) for index in range(len(self.layers))]
        del self.latents, self.parts_pairs
        object.__setattr__(self, "__class__", DynamicCache)
        self.layers = layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only stock attention calls this, when the model was disabled: it gets the cache it knows."""
        self.release()
        return self.update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def batch_size(self) -> int:
        return self.latents.requests or -1

    def reset(self) -> None:
        self.latents.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.latents.select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.latents.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.latents.select(torch.arange(self.latents.requests).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must be the number of tokens to remove as a negative int, got {tokens_to_remove}"
            )
        self.latents.drop_columns(-tokens_to_remove)

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Pages are allocated as tokens come."""

    def __iter__(self) -> NoReturn:
        raise NotImplementedError("a paged latent cache holds no keys and values to iterate over")


class PagedLatentLayer(CacheLayerMixin):
    """One layer of a ``PagedLatentCache``, for those who ask a layer and not the cache."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, latents: PagedLatents) -> None:
        super().__init__()
        self._latents = latents

    def get_seq_length(self) -> int:
        return self._latents.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._latents.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Pages are allocated as tokens come."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("the layers of a paged latent cache share their pages: update the cache")

    offload = prefetch = reset = reorder_cache = crop = update
    batch_repeat_interleave = batch_select_indices = update


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
