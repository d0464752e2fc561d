"""The caches of a DeepSeek-V4 model's layers for one padded batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashlatte.integrations.transformers.v4.masks import PassMask
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.layers.v4 import V4Cache, V4Config, V4Step
from flashlatte.layers.v4.step import V4Groups
from flashlatte.layers.v4.workspace import DEFAULT_LIMITS


class V4Store:
    """The caches of a batch whose requests have equal numbers of columns, padding included.

    Page c of request r is page c · requests + r, so that new columns append pages, and requests are an axis.

    Args:
        configs: configurations of the layers.
        layout: format of keys and groups.
        page_size: page size of all caches but states.
        backend: backend of the layers' operations.

    Raises:
        ValueError: layers with and without an indexer have groups of the same size.
    """

    # Limits within which a prompt attends over a workspace.
    workspaces = DEFAULT_LIMITS

    def __init__(self, configs: list[V4Config], layout: CacheFormat, page_size: int, backend: str | None) -> None:
        selecting = {config.ratio for config in configs if config.ratio and config.indexer is not None}
        for config in configs:
            if config.ratio in selecting and config.indexer is None:
                raise ValueError(
                    f"compress_rates must differ between layer types, whose states differ, got {config.ratio} for both"
                )
        # The unmodified configs identify the model.
        self.model_configs = tuple(configs)
        self.configs = configs
        self.layout = layout
        self.page_size = page_size
        self.backend = backend
        self.clear()

    def clear(self) -> None:
        """Remove all requests and caches."""
        self.requests = self.columns = self._pages = self._new_columns = 0
        self._caches: dict[int, V4Cache] = {}
        self._mask = PassMask(0)
        self._step: V4Step | None = None

    def plan(
        self,
        requests: int,
        queries: int,
        device: torch.device,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        """Plan a pass of ``queries`` new columns. All columns are stored and included in groups, as in transformers.

        Args:
            attention_mask: [requests, columns], the columns that are visible to windows; None: all.
            position_ids: [requests or 1, queries], for rotation and visibility of groups; None: the columns.

        Raises:
            TypeError, ValueError: another number of requests than before, a mask or positions that do not fit the
                pass, or a history that a failed pass has overwritten.
        """
        if self.requests not in (0, requests):
            raise ValueError(f"input must have the cache's {self.requests} requests, got {requests}")
        if self.columns and self._new_columns:
            raise ValueError(
                "the cache must be a new one: the previous pass failed, and overwrote states of unfinished groups"
            )
        self._mask = PassMask.read(requests, self.columns, queries, device, attention_mask, position_ids)
        self.requests, self._new_columns, self._step = requests, queries, None
        self._extend_rope(self._mask.max_length)
        self._grow(device)

    def commit(self) -> None:
        """Add the pass's columns to the history."""
        self.columns, self._new_columns, self._step = self.columns + self._new_columns, 0, None

    def cache(self, layer: int) -> V4Cache:
        return self._caches[layer]

    def step(self, position_ids: torch.Tensor) -> V4Step:
        """The step of the pass for all layers; ``position_ids`` [requests or 1, queries] are its rotary positions."""
        if self._step is None:
            device, mask = position_ids.device, self._mask
            # A workspace holds only the columns of a causal, contiguous window, and the groups before it.
            limits = None if mask.ahead or mask.visible is not None else self.workspaces
            ratios = {config.ratio: config for config in self.configs if config.ratio}
            step = V4Step.from_spans(
                [(self.columns, self.columns + self._new_columns)] * self.requests,
                self._table(self._pages, device),
                {ratio: self._tables(ratio, device) for ratio in ratios},
                window=self.configs[0].window,
                page_size=self.page_size,
                rotary_positions=position_ids.expand(self.requests, -1).flatten(),
                first_tokens=mask.first_tokens,
                limits=limits,
                backend=self.backend,
            )
            groups = {ratio: self._stock_groups(step, ratio, config) for ratio, config in ratios.items()}
            self._step = replace(step, window_slots=mask.hide(step), groups=groups)
        return self._step

    def _stock_groups(self, step: V4Step, ratio: int, config: V4Config) -> V4Groups:
        """The step's groups with stock attention's visibility.

        In stock attention, the first (position + 1) // ratio groups are visible if they are complete at the end of the
        pass; in a ``V4Step``, only groups up to the token's own column. In layers without an indexer, a single query
        attends to all groups.
        """
        if self._new_columns == 1 and config.indexer is None:
            visible_until = step.positions
        elif self._mask.ahead:
            visible_until = step.rotary_positions.clamp_max(self.columns + self._new_columns - 1)
        else:
            return step.groups[ratio]
        tables = self._tables(ratio, step.positions.device)
        return V4Groups.build(
            ratio, step.request_ids, step.positions, visible_until, *tables, self.page_size, self.backend
        )

    def select(self, rows: torch.Tensor) -> None:
        """Replace the batch by requests of it, given by index (repeats allowed)."""
        if self.requests == 0:
            return
        for layer, cache in self._caches.items():
            selected = {}
            for name, old in cache.tensors.items():
                wanted = rows.to(old.device)
                pages = torch.arange(old.shape[0], device=old.device).view(-1, self.requests)[:, wanted].flatten()
                new = _empty_like(old, len(pages))
                new.copy_(old[pages])
                selected[name] = new
            self._caches[layer] = replace(cache, **selected)
        self.requests = len(rows)

    def _extend_rope(self, positions: int) -> None:
        """Extend the rotary tables beyond the config's max_position, as transformers does."""
        max_length = min(config.rope.max_position for config in self.configs)
        if positions > max_length:
            max_length = max(positions, 2 * max_length)
            ropes = [replace(config.rope, max_position=max_length) for config in self.configs]
            self.configs = [replace(config, rope=rope) for config, rope in zip(self.configs, ropes, strict=True)]

    def _grow(self, device: torch.device) -> None:
        needed = -(-(self.columns + self._new_columns) // self.page_size)
        if needed <= self._pages:
            return
        self._pages = max(needed, 2 * self._pages)
        for layer, config in enumerate(self.configs):
            old, ratio = self._caches.get(layer), max(config.ratio, 1)
            # An inference tensor cannot be written to outside of inference mode.
            with torch.inference_mode(False):
                new = V4Cache.allocate(
                    config,
                    self._pages * self.requests,
                    self.page_size,
                    group_pages=self._group_pages(ratio) * self.requests,
                    state_pages=(1 + config.overlap) * self.requests,
                    state_page_size=ratio,
                    cache_format=self.layout,
                    device=device,
                )
            if old is not None:
                for name, before in old.tensors.items():
                    new.tensors[name][: before.shape[0]].copy_(before)
            self._caches[layer] = new

    def _group_pages(self, ratio: int) -> int:
        return -(-self._pages // ratio)

    def _table(self, pages: int, device: torch.device) -> torch.Tensor:
        table = torch.arange(pages * self.requests, dtype=torch.int32, device=device)
        return table.view(pages, self.requests).T.contiguous()

    def _tables(self, ratio: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        overlap = max(config.overlap for config in self.configs if config.ratio == ratio)
        return self._table(self._group_pages(ratio), device), self._table(1 + overlap, device)


def _empty_like(cache: torch.Tensor, pages: int) -> torch.Tensor:
    """A zeroed cache of ``pages`` pages with the strides of ``cache``."""
    stride = cache.stride(0)
    with torch.inference_mode(False):
        storage = torch.zeros(pages * stride, dtype=cache.dtype, device=cache.device)
        return storage.as_strided((pages, *cache.shape[1:]), cache.stride())
