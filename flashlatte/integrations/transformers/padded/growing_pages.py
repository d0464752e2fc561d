"""Cache tensors of several layers, allocated on first use and grown with the page table."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashlatte import kv_cache
from flashlatte.kv_cache import CacheFormat


class GrowingPages:
    """One paged tensor for each layer.

    Args:
        layout: format of the pages.
        page_size: tokens in a page.
        layouts: formats by layer, for the layers whose format is not ``layout``.
    """

    def __init__(self, layout: CacheFormat, page_size: int, layouts: Mapping[int, CacheFormat] | None = None) -> None:
        self.layout, self.layouts = layout, dict(layouts or {})
        self._page_size = page_size
        self._tensors: dict[int, torch.Tensor] = {}

    def __contains__(self, layer: int) -> bool:
        return layer in self._tensors

    def __getitem__(self, layer: int) -> torch.Tensor:
        return self._tensors[layer]

    def layout_of(self, layer: int) -> CacheFormat:
        """The format of a layer's pages."""
        return self.layouts.get(layer, self.layout)

    def clear(self) -> None:
        self._tensors = {}

    def of(self, layer: int, device: torch.device, num_pages: int) -> torch.Tensor:
        """The layer's tensor with at least ``num_pages`` pages; existing contents are kept."""
        pages = self._tensors.get(layer)
        if pages is None or pages.shape[0] < num_pages:
            # An inference tensor cannot be written to outside of inference mode.
            with torch.inference_mode(False):
                grown = kv_cache.allocate(self.layout_of(layer), num_pages, self._page_size, device=device)
            if pages is not None:
                grown[: pages.shape[0]].copy_(pages)
            self._tensors[layer] = pages = grown
        return pages

    def grown(self, num_pages: int) -> list[torch.Tensor]:
        """All tensors, with at least ``num_pages`` pages each."""
        return [self.of(layer, pages.device, num_pages) for layer, pages in list(self._tensors.items())]
