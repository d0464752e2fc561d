"""The paged caches of a DeepSeek-V4 layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.codec import allocate
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.index_formats import index_format, index_format_beside
from flashlatte.kv_cache.registry import DEEPSEEK_V4_FORMAT, as_format
from flashlatte.layers.v4.config import V4Config
from flashlatte.runtime import checks


@dataclass(frozen=True)
class V4Cache:
    """The caches of one layer: None for groups in a layer without groups, and for the indexer in one without indexer.

    Attributes:
        window: [pages, page_size, 1, width], keys of tokens.
        groups: [pages, page_size, 1, width], one row for each group, in the same format.
        states: float32 [pages, page_size, 2 · (1 + overlap) · head_dim], states of unfinished groups.
        index_keys: [pages, page_size, 1, width], one index key for each group, with the tables of ``groups``.
        index_states: states of unfinished index keys, with the tables of ``states``.
    """

    window: torch.Tensor
    groups: torch.Tensor | None = None
    states: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    index_states: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls,
        config: V4Config,
        pages: int,
        page_size: int = 64,
        *,
        group_pages: int | None = None,
        state_pages: int = 1,
        state_page_size: int = 4,
        cache_format: str | CacheFormat = DEEPSEEK_V4_FORMAT,
        device: torch.device | str | None = None,
    ) -> V4Cache:
        """Allocate zeroed caches for a layer.

        Args:
            config: configuration of the layer.
            pages, page_size: of the cache of tokens, and of the cache of groups.
            group_pages: pages of the cache of groups; ``pages`` if None.
            state_pages, state_page_size: of the states.
            cache_format: by default DeepSeek-V4's own, for rows of 512 elements; unquantised formats fit any head_dim.
                Index keys use the matching format.
            device: torch's default device if None.

        Raises:
            TypeError, ValueError: as ``kv_cache.allocate``; a format that does not fit rows of head_dim.
        """
        checks.instance("config", config, V4Config)
        layout = as_format(cache_format, config.head_dim)
        window = allocate(layout, pages, page_size, device=device)
        if config.ratio == 0:
            return cls(window)
        shape = checks.positive_int("state_pages", state_pages), checks.positive_int("state_page_size", state_page_size)
        count = pages if group_pages is None else group_pages

        def states(head_dim: int) -> torch.Tensor:
            return torch.zeros(*shape, 2 * (1 + config.overlap) * head_dim, dtype=torch.float32, device=device)

        groups = allocate(layout, count, page_size, device=device)
        if config.indexer is None:
            return cls(window, groups, states(config.head_dim))
        head_dim = config.indexer.head_dim
        keys = index_format(index_format_beside(layout), head_dim)
        return cls(
            window,
            groups,
            states(config.head_dim),
            allocate(keys, count, page_size, device=device),
            states(head_dim),
        )
