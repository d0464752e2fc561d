"""Base classes of paged caches with transformers' ``Cache`` interface. Importing this imports transformers."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache


class PagedLayer(CacheLayerMixin):
    """One layer of a paged cache, which forwards queries about lengths to the cache."""

    supports_early_init = False

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def get_seq_length(self) -> int:
        return self._store.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._store.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: pages are allocated when tokens are added."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("the layers of a paged cache share their pages: update the cache")

    offload = prefetch = reset = reorder_cache = crop = update
    batch_repeat_interleave = batch_select_indices = update


class PagedCache(DynamicCache):
    """A ``DynamicCache`` whose layers are stored in pages, except transformers' layers of linear attention.

    Attributes:
        store: the pages and their bookkeeping: ``columns``, ``requests``, ``clear`` and ``select``.
        layer_class: class of the layers.
    """

    store: Any
    layer_class: ClassVar[type[PagedLayer]]

    @classmethod
    def _from_empty(cls, cache: DynamicCache, store: Any, num_layers: int) -> Any:
        """Convert an empty ``DynamicCache`` in place, since the caller keeps a reference to it."""
        object.__setattr__(cache, "__class__", cls)
        paged: Any = cache
        paged.store = store
        paged.layers = [cls.layer_class(store) for _ in range(num_layers)]
        paged.layer_class_to_replicate = None
        return paged

    @property
    def linear_layers(self) -> list[tuple[int, Any]]:
        """The layers that are not stored in pages, with their index."""
        return [(index, layer) for index, layer in enumerate(self.layers) if not isinstance(layer, PagedLayer)]

    @property
    def batch_size(self) -> int:
        return self.store.requests or -1

    def reset(self) -> None:
        self.store.clear()
        for _, layer in self.linear_layers:
            layer.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.store.select(beam_idx)
        for _, layer in self.linear_layers:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.store.requests).repeat_interleave(repeats))

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: pages are allocated when tokens are added."""

    def __iter__(self) -> NoReturn:
        raise NotImplementedError("a paged cache holds no keys and values to iterate over")
