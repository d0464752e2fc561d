"""The paged caches of DeepSeek-V4.1's layers, in which layers share groups and index keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.v41 import V41Format
from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v41.config import V41Config, check_layers


def allocate_caches(
    layers: Sequence[V41Config],
    pages: int,
    page_size: int = 64,
    *,
    group_pages: int | None = None,
    state_pages: int = 1,
    state_page_size: int = 2,
    cache_format: str | CacheFormat = V41Format.name,
    group_format: str | None = None,
    device: torch.device | str | None = None,
) -> list[V4Cache]:
    """Allocate zeroed caches for a model's layers. A layer that shares groups has the tensors of its ``kv_source``.

    Args:
        layers: configurations of all layers.
        pages, page_size, group_pages, state_pages, state_page_size, cache_format, group_format, device: as for
            ``V4Cache.allocate``; by default in format ``v41``, for rows of 512 elements.

    Raises:
        TypeError, ValueError: as ``V4Cache.allocate`` and ``check_layers``.
    """
    check_layers(layers)
    caches: list[V4Cache] = []
    for config in layers:
        cache = V4Cache.allocate(
            config,
            pages,
            page_size,
            group_pages=group_pages,
            state_pages=state_pages,
            state_page_size=state_page_size,
            cache_format=cache_format,
            group_format=group_format,
            device=device,
        )
        if config.kv_source is not None and not config.stores_groups:
            source = caches[config.kv_source]
            keys = source.index_keys if config.selects_groups else None
            cache = replace(cache, groups=source.groups, index_keys=keys)
        caches.append(cache)
    return caches
