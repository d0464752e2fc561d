"""Groups of a DeepSeek-V4.1 layer in a step: stores finished groups and index keys, and selects groups."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.layers.v4.group_step import GroupStep, SelectedGroups
from flashlatte.layers.v41.config import V41Config
from flashlatte.layers.v41.selection import IndexQueries, SharedSelections
from flashlatte.layers.weights import norm_weight
from flashlatte.ops.cache_write import cache_write
from flashlatte.ops.compress import compress
from flashlatte.ops.norm_rope import Rotary, rotate_heads


class V41GroupStep(GroupStep):
    """``GroupStep`` of a layer that may share groups and selections with others.

    A group's latent is the RMSNorm of Σ_t softmax_t(gate[t]) · kv[t] over its tokens, without rotation. It is rotated
    by the position of the group's first token and stored. Its index key is the RMSNorm of the latent's projection,
    rotated likewise.

    Args:
        selections: the selections of the step's indexers so far.
        arguments: as for ``GroupStep``.
    """

    _config: V41Config

    def __init__(self, *arguments: Any, selections: SharedSelections) -> None:
        super().__init__(*arguments)
        self._selections = selections
        self._has_work = self._config.stores_groups or self._config.selects_groups

    def start(self) -> None:
        if self._has_work:
            self._side.run(self._store_and_select)

    def finish(self) -> SelectedGroups | None:
        # During capture, do not join a side stream without captured work.
        if self._has_work:
            self._side.join()
        return None if self._config.index_source is None else self._selections.groups[self._config.index_source]

    def _store_and_select(self) -> None:
        if self._config.stores_groups:
            self._store()
        if self._config.selects_groups:
            self._select()

    def _store(self) -> None:
        """Store the groups that the step's tokens complete, and their index keys."""
        config, step, cache = self._config, self._step, self._cache
        ends = (step.positions + 1) % config.ratio == 0
        slots = step.groups[config.ratio].slots.where(ends, -1)
        first = torch.div(step.positions, config.ratio, rounding_mode="floor") * config.ratio
        if cache.groups is None:
            return
        self._selections.caches[config.layer] = cache
        latents = self._latents()
        if cache.index_keys is not None:
            indexer = self._compressor.indexer
            keys = indexer.k_proj(latents)
            self._normalize(keys, norm_weight(indexer, "k_norm"), self._table, first, cache.index_keys, slots)
        tail = latents[:, config.head_dim - config.rope_dim :].unsqueeze(1)
        rotate_heads(tail, Rotary(self._table, first, interleaved=True), out=tail, backend=self._backend)
        cache_write(cache.groups, slots, latents, cache_format=cache.group_format, backend=self._backend)

    def _latents(self) -> torch.Tensor:
        """Normalized latents [T, head_dim]; rows of tokens that complete no group are undefined."""
        config, step = self._config, self._step
        kv, gate = self._projected.group_kv, self._projected.group_gate
        latents = kv.new_empty(1, kv.shape[0], 1, config.head_dim)
        weight = norm_weight(self._compressor, "kv_norm")
        # Row 0 is no rotation; positions are clamped to the table's only row.
        unrotated = self._table[:1]
        slots = torch.arange(kv.shape[0], device=kv.device)
        if config.ratio == 1:
            self._normalize(kv, weight, unrotated, step.positions, latents, slots)
        else:
            compress(
                kv,
                gate,
                kv.new_zeros(config.ratio, config.head_dim, dtype=torch.float32),
                weight,
                unrotated,
                step.request_ids,
                step.positions,
                latents,
                slots,
                state_cache=self._cache.states,
                state_table=step.groups[config.ratio].state_table,
                eps=config.rms_norm_eps,
                backend=self._backend,
            )
        return latents[0, :, 0]

    def _normalize(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Normalize and rotate rows, and store them: ``compress`` with groups of one token, whose score is unused."""
        compress(
            rows,
            rows,
            rows.new_zeros(1, rows.shape[1], dtype=torch.float32),
            weight,
            table,
            self._step.request_ids,
            positions,
            cache,
            slots,
            eps=self._config.rms_norm_eps,
            backend=self._backend,
        )

    def _select(self) -> None:
        config, keys = self._config, self._cache.index_keys
        if config.indexer is None or keys is None:
            return
        q, weights = self._index_queries(self._compressor.indexer, config.indexer, keys)
        candidates, selections = config.candidates, self._selections
        if candidates is None:
            selected = self._select_among_all(q, weights, keys, config.indexer.topk)
        else:
            groups = self._step.groups[config.ratio]
            queries = IndexQueries(q, weights, keys, groups, config.indexer.topk, self._backend)
            if config.publishes_candidates:
                selected, selections.blocks[config.layer] = queries.select_and_publish(candidates)
            else:
                selected = queries.select_within(candidates, selections.blocks[candidates.source])
        selections.groups[config.layer] = selected
