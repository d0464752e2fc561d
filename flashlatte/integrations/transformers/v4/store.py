"""The caches of a DeepSeek-V4 model's layers for one batch, growing by pages as its rows grow by columns."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.layers.v4 import V4Cache, V4Config, V4Step
from flashlatte.layers.v4.step import V4Groups
from flashlatte.layers.v4.workspace import DEFAULT_LIMITS


class V4Store:
    """What the layers remember of a batch whose rows have equally many columns, padding included.

    A request's pages are column-major: page c of request r is c · requests + r, so that more columns are more pages at
    the end, and requests are chosen by an axis.

    Args:
        configs: of the layers.
        layout: of keys and groups.
        page_size: of all pages but states'.
        backend: of the layers' operations.

    Raises:
        ValueError: layers that select groups and layers that see all of them have groups of one size.
    """

    # Which prompts attend over a workspace.
    workspaces = DEFAULT_LIMITS

    def __init__(self, configs: list[V4Config], layout: CacheFormat, page_size: int, backend: str | None) -> None:
        selecting = {config.ratio for config in configs if config.ratio and config.indexer is not None}
        for config in configs:
            if config.ratio in selecting and config.indexer is None:
                raise ValueError(
                    "compress_rates must differ between the kinds of layers, whose states of a group do, got "
                    f"{config.ratio} for both"
                )
        # As they were given, for those who ask whose cache this is.
        self.given = tuple(configs)
        self.configs = configs
        self.layout = layout
        self.page_size = page_size
        self.backend = backend
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.requests = self.columns = self._pages = self._coming = 0
        self._caches: dict[int, V4Cache] = {}
        self._first: torch.Tensor | None = None
        self._step: V4Step | None = None

    def plan(
        self,
        requests: int,
        queries: int,
        device: torch.device,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        """A pass of ``queries`` new columns begins. ``mask`` [requests, columns] hides padding on the left, or on the
        right: that no token sees, so that nothing is hidden for it, and none may follow it.

        Args:
            position_ids: by which the columns are rotated, where the caller chose them; read from the device.

        Raises:
            ValueError: another batch than before, a mask that hides anything between tokens, or a history that a pass
                which failed has spoiled.
        """
        if self.requests not in (0, requests):
            raise ValueError(f"the cache holds {self.requests} requests, and the pass has {requests}")
        if self.columns and self._coming:
            raise ValueError(
                "the cache must be new: the pass before failed, and has overwritten what unfinished groups need"
            )
        first = self._first
        if mask is not None:
            total = self.columns + queries
            seen = mask.to(device) != 0
            before = seen.new_zeros(seen.shape[0], 1)
            begins = seen & ~torch.cat((before, seen), dim=1)[:, :-1]
            if seen.shape != (requests, total) or bool((begins.sum(dim=1) > 1).any()):
                raise ValueError(
                    f"attention_mask must be [{requests}, {total}] and hide nothing between tokens that are seen, got "
                    f"{list(mask.shape)}"
                )
            padding = (seen.cumsum(dim=1) == 0).sum(dim=1)
            first = padding if bool(padding.any()) else None
        self.requests, self._coming, self._first, self._step = requests, queries, first, None
        positions = self.columns + queries
        if position_ids is not None and position_ids.numel():
            positions = max(positions, int(position_ids.max()) + 1)
        self._rotate_up_to(positions)
        self._grow(device)

    def commit(self) -> None:
        """The pass succeeded: its columns are history."""
        self.columns, self._coming, self._step = self.columns + self._coming, 0, None

    def cache(self, layer: int) -> V4Cache:
        return self._caches[layer]

    def step(self, position_ids: torch.Tensor) -> V4Step:
        """The pass as all layers see it; ``position_ids`` [requests or 1, queries] are those it is rotated by."""
        if self._step is None:
            device = position_ids.device
            turned_by = position_ids.expand(self.requests, -1).flatten()
            ratios = {config.ratio: config for config in self.configs if config.ratio}
            step = V4Step.of_spans(
                [(self.columns, self.columns + self._coming)] * self.requests,
                self._table(self._pages, device),
                {ratio: self._tables(ratio, device) for ratio in ratios},
                window=self.configs[0].window,
                page_size=self.page_size,
                rotary_positions=turned_by,
                first_tokens=self._first,
                limits=self.workspaces,
                backend=self.backend,
            )
            if self._coming == 1:
                # As in transformers a single query sees all groups that are there, where none selects among them.
                groups = dict(step.groups)
                for ratio, config in ratios.items():
                    if config.indexer is None:
                        groups[ratio] = V4Groups.build(
                            ratio,
                            step.request_ids,
                            step.positions,
                            step.positions,
                            *self._tables(ratio, device),
                            self.page_size,
                            self.backend,
                        )
                step = replace(step, groups=groups)
            self._step = step
        return self._step

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these requests, in this order; one may be there several times."""
        if self.requests == 0:
            return
        for layer, cache in self._caches.items():
            chosen = {}
            for field in fields(cache):
                old = getattr(cache, field.name)
                if old is not None:
                    wanted = rows.to(old.device)
                    pages = torch.arange(old.shape[0], device=old.device).view(-1, self.requests)[:, wanted].flatten()
                    new = _like(old, len(pages))
                    new.copy_(old[pages])
                    chosen[field.name] = new
            self._caches[layer] = V4Cache(**chosen)
        if self._first is not None:
            self._first = self._first[rows.to(self._first.device)]
        self.requests = len(rows)

    def _rotate_up_to(self, positions: int) -> None:
        """As transformers does, go on beyond the positions that the model's config names."""
        longest = min(config.rope.max_position for config in self.configs)
        if positions > longest:
            longest = max(positions, 2 * longest)
            ropes = [replace(config.rope, max_position=longest) for config in self.configs]
            self.configs = [replace(config, rope=rope) for config, rope in zip(self.configs, ropes, strict=True)]

    def _grow(self, device: torch.device) -> None:
        needed = -(-(self.columns + self._coming) // self.page_size)
        if needed <= self._pages:
            return
        self._pages = max(needed, 2 * self._pages)
        for layer, config in enumerate(self.configs):
            old, ratio = self._caches.get(layer), max(config.ratio, 1)
            # An inference tensor could not be written to outside of inference mode later.
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
                for field in fields(old):
                    before = getattr(old, field.name)
                    if before is not None:
                        getattr(new, field.name)[: before.shape[0]].copy_(before)
            self._caches[layer] = new

    def _group_pages(self, ratio: int) -> int:
        return -(-self._pages // ratio)

    def _table(self, pages: int, device: torch.device) -> torch.Tensor:
        table = torch.arange(pages * self.requests, dtype=torch.int32, device=device)
        return table.view(pages, self.requests).T.contiguous()

    def _tables(self, ratio: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        overlap = max(config.overlap for config in self.configs if config.ratio == ratio)
        return self._table(self._group_pages(ratio), device), self._table(1 + overlap, device)


def _like(cache: torch.Tensor, pages: int) -> torch.Tensor:
    """A cache of so many pages, laid out as this one."""
    stride = cache.stride(0)
    with torch.inference_mode(False):
        storage = torch.zeros(pages * stride, dtype=cache.dtype, device=cache.device)
        return storage.as_strided((pages, *cache.shape[1:]), cache.stride())
