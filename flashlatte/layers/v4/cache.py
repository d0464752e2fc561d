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
    """The caches of one layer; None for those of groups or of the indexer if the layer has none.

    Attributes:
        window: [pages, page_size, 1, width], keys of tokens.
        groups: [pages, page_size, 1, width], one row for each group, in the same format; or in ``v41_fp4`` if the
            window is in ``v41``.
        states: float32 [pages, page_size, state_dim], states of unfinished groups.
        index_keys: [pages, page_size, 1, width], one index key for each group, with the tables of ``groups``.
        index_states: states of unfinished index keys, with the tables of ``states``.
        cache_format: format of ``window``; None infers it, which ``v41`` does not allow.
    """

    window: torch.Tensor
    groups: torch.Tensor | None = None
    states: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    index_states: torch.Tensor | None = None
    cache_format: CacheFormat | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The caches that the layer has, by attribute."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    @property
    def group_format(self) -> CacheFormat | None:
        """Format of ``groups``; None infers it."""
        if self.cache_format is None or self.groups is None:
            return self.cache_format
        return self.cache_format.second_format(self.groups.shape[-1])

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
        group_format: str | None = None,
        device: torch.device | str | None = None,
    ) -> V4Cache:
        """Allocate zeroed caches for a layer.

        Args:
            config: configuration of the layer.
            pages, page_size: number and size of the pages, in the cache of tokens and in the cache of groups.
            group_pages: pages of the cache of groups; ``pages`` if None.
            state_pages, state_page_size: number and size of the pages of states.
            cache_format: by default DeepSeek-V4's own, for rows of 512 elements; unquantized formats fit any head_dim.
                Index keys use the matching format.
            group_format: format of groups; ``cache_format`` if None. Another one is accepted beside ``v41`` only:
                ``v41_fp4``.
            device: torch's default device if None.

        Raises:
            TypeError, ValueError: as ``kv_cache.allocate``; a format that does not fit rows of head_dim, or two formats
                that attention does not read together.
        """
        checks.instance("config", config, V4Config)
        layout = as_format(cache_format, config.head_dim)
        window = allocate(layout, pages, page_size, device=device)
        if not config.stores_groups:
            return cls(window, cache_format=layout)
        of_groups = layout if group_format is None else as_format(group_format, config.head_dim)
        if layout.second_format(of_groups.record_width) != of_groups:
            raise ValueError(
                f"group_format must be {layout.name} like cache_format, or v41_fp4 beside v41, got {of_groups.name}"
            )
        shape = checks.positive_int("state_pages", state_pages), checks.positive_int("state_page_size", state_page_size)
        count = pages if group_pages is None else group_pages

        def states(width: int) -> torch.Tensor | None:
            return torch.zeros(*shape, width, dtype=torch.float32, device=device) if width else None

        keys = None
        if config.selects_groups and config.indexer is not None:
            layout_of_keys = index_format(index_format_beside(layout), config.indexer.head_dim)
            keys = allocate(layout_of_keys, count, page_size, device=device)
        groups = allocate(of_groups, count, page_size, device=device)
        return cls(window, groups, states(config.state_dim), keys, states(config.index_state_dim), layout)
