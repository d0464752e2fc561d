"""The caches of a DeepSeek-V4 model's layers for one batch, growing by pages as its rows grow by columns."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from flashlatte.integrations.transformers.v4.masks import PassMask
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
        """A pass of ``queries`` new columns begins. All columns are stored, and become part of groups, as in stock.

        Args:
            attention_mask: [requests, columns], the columns that the windows of this pass see; None: all.
            position_ids: [requests or 1, queries], by which queries are rotated and see groups; None: the columns.

        Raises:
            TypeError, ValueError: another batch than before, a mask or positions that do not fit the pass, or a history
                that a failed pass has overwritten.
        """
        if self.requests not in (0, requests):
            raise ValueError(f"the cache holds {self.requests} requests, and the pass has {requests}")
        if self.columns and self._coming:
            raise ValueError(
                "the cache must be new: the pass before failed, and has overwritten what unfinished groups need"
            )
        self._mask = PassMask.read(requests, self.columns, queries, device, attention_mask, position_ids)
        self.requests, self._coming, self._step = requests, queries, None
        self._rotate_up_to(self._mask.longest)
        self._grow(device)

    def commit(self) -> None:
        """The pass succeeded: its columns are history."""
        self.columns, self._coming, self._step = self.columns + self._coming, 0, None

    def cache(self, layer: int) -> V4Cache:
        return self._caches[layer]

    def step(self, position_ids: torch.Tensor) -> V4Step:
        """The pass as all layers see it; ``position_ids`` [requests or 1, queries] are those it is rotated by."""
        if self._step is None:
            device, mask = position_ids.device, self._mask
            # A workspace has room for the columns that a causal, contiguous window reaches, and for groups before it.
            limits = None if mask.ahead or mask.visible is not None else self.workspaces
            ratios = {config.ratio: config for config in self.configs if config.ratio}
            step = V4Step.of_spans(
                [(self.columns, self.columns + self._coming)] * self.requests,
                self._table(self._pages, device),
                {ratio: self._tables(ratio, device) for ratio in ratios},
                window=self.configs[0].window,
                page_size=self.page_size,
                rotary_positions=position_ids.expand(self.requests, -1).flatten(),
                first_tokens=mask.first_tokens,
                limits=limits,
                backend=self.backend,
            )
            groups = {ratio: self._as_seen(step, ratio, config) for ratio, config in ratios.items()}
            self._step = replace(step, window_slots=mask.hide(step), groups=groups)
        return self._step

    def _as_seen(self, step: V4Step, ratio: int, config: V4Config) -> V4Groups:
        """The step's groups with as many for each token as stock attention sees.

        That is (position + 1) // ratio, of the groups that are complete at the end of the pass, where a ``V4Step``
        stops at the token's own column. A single query sees all of them in layers without an indexer.
        """
        if self._coming == 1 and config.indexer is None:
            seeing = step.positions
        elif self._mask.ahead:
            seeing = step.rotary_positions.clamp_max(self.columns + self._coming - 1)
        else:
            return step.groups[ratio]
        tables = self._tables(ratio, step.positions.device)
        return V4Groups.build(ratio, step.request_ids, step.positions, seeing, *tables, self.page_size, self.backend)

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
