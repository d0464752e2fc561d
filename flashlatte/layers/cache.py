"""The paged latent cache of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.kv_cache import CacheFormat
from flashlatte.ops.cache_gather import cache_gather
from flashlatte.ops.cache_write import cache_write
from flashlatte.runtime import machine


@dataclass(frozen=True)
class LatentCache:
    """Latent rows [latent | rope] in pages.

    Attributes:
        pages: [pages, page_size, 1, width].
        layout: format of the pages.
        latent_dim: elements of a row before the rope part.
        scale: the scale of format ``fp8``; None for others.
    """

    pages: torch.Tensor
    layout: CacheFormat
    latent_dim: int
    scale: float | torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.pages.shape[1]

    @property
    def is_quantized(self) -> bool:
        return self.layout.is_quantized

    @property
    def value_dim(self) -> int:
        """Leading elements of a row that decode uses as the value: the latent's, or as the format defines."""
        return self.latent_dim if self.layout.plain else self.layout.value_dim

    def write(self, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
        cache_write(self.pages, slot_mapping, rows, cache_format=self.layout, scale=self.scale)

    def gather(
        self, block_table: torch.Tensor, cu_keys: torch.Tensor, tokens: int, dtype: torch.dtype, **options: Any
    ) -> torch.Tensor:
        """``cache_gather`` with its ``options``: dequantized rows [tokens, head_dim], in the order of the requests."""
        options |= {"cache_format": self.layout, "scale": self.scale, "total_tokens": tokens, "dtype": dtype}
        return cache_gather(self.pages, block_table, cu_keys, **options)

    def query_dtype(self, dtype: torch.dtype, reference: bool = False) -> torch.dtype:
        """The dtype of queries over this cache, for hidden states of ``dtype``.

        An unquantized cache takes queries of its own dtype, a quantized one those of the model. GPU kernels take
        float32 queries over a quantized cache as bf16, whose rounding error is smaller than the cache's.
        """
        if not self.is_quantized:
            return self.layout.record_dtype
        for_kernels = dtype == torch.float32 and machine.device_type(self.pages.device) != "cpu" and not reference
        return torch.bfloat16 if for_kernels else dtype
