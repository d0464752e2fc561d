"""Compressed groups of a layer in a step: stores finished groups, and selects the groups that tokens attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.index_formats import as_index_cache
from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v4.config import V4Config, V4IndexerConfig
from flashlatte.layers.v4.modules import Projected
from flashlatte.layers.v4.step import V4Groups, V4Step
from flashlatte.layers.weights import norm_weight
from flashlatte.ops.compress import compress
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.index_query import index_query
from flashlatte.ops.index_select import paged_index_select
from flashlatte.ops.norm_rope import Rotary, rotate_heads
from flashlatte.runtime.side_stream import SideStream

# Steps with more tokens fill the GPU. At this size, overlap gains 3% of a step with an indexer.
MAX_OVERLAPPED_TOKENS = 256


@dataclass(frozen=True)
class SelectedGroups:
    """The groups that tokens attend to.

    Attributes:
        indices: int32 [T, topk], groups of the token's own request, ascending, then -1. None: all visible groups.
        counts: int32 [T], number of groups.
        groups: the step's groups.
        backend: backend of index conversions.
    """

    indices: torch.Tensor | None
    counts: torch.Tensor
    groups: V4Groups
    backend: str | None

    def slots(self, tokens: slice) -> torch.Tensor:
        """Slots of the groups of ``tokens``, then -1: int32 [n, any]."""
        if self.indices is None:
            return self.groups.all_slots[tokens]
        groups = self.groups
        return index_convert(
            self.indices[tokens],
            groups.table,
            groups.page_size,
            request_ids=groups.request_ids[tokens],
            backend=self.backend,
        )

    def indices_below(self, limit: int, tokens: slice) -> torch.Tensor:
        """Groups of ``tokens``, all below ``limit``, then -1: int32 [n, any]."""
        if self.indices is not None:
            return self.indices[tokens]
        every = torch.arange(limit, dtype=torch.int32, device=self.counts.device)
        return every.where(every < self.counts[tokens].unsqueeze(1), -1)


class GroupStep:
    """Stores finished groups and selects groups on a side stream, while the layer computes its queries.

    With few tokens, either chain of kernels leaves most of the GPU idle (docs/notes/deepseek-v4.md).

    Args:
        compressor: module with position_bias, kv_norm, and an optional indexer; None in a layer without groups.
        q_latent: [T, q_lora_rank], normalized.
        table: float32 cosines and sines of the layer.
    """

    def __init__(
        self,
        compressor: Any,
        config: V4Config,
        projected: Projected,
        q_latent: torch.Tensor,
        step: V4Step,
        cache: V4Cache,
        table: torch.Tensor,
        backend: str | None,
    ) -> None:
        self._compressor, self._config, self._projected, self._q_latent = compressor, config, projected, q_latent
        self._step, self._cache, self._table, self._backend = step, cache, table, backend
        self._selected: SelectedGroups | None = None
        self._side = SideStream(q_latent.device, q_latent.shape[0] <= MAX_OVERLAPPED_TOKENS)

    def start(self) -> None:
        """Launch the longer chain on the side stream."""
        if self._config.indexer is not None:
            self._side.run(self._select)
        elif self._config.ratio:
            self._side.run(self._write_groups)

    def finish(self) -> SelectedGroups | None:
        """Wait until groups are stored and selected; returns the selection, None in a layer without groups."""
        config = self._config
        if config.ratio == 0:
            return None
        if config.indexer is not None:
            self._write_groups()
        self._side.join()
        groups = self._step.groups[config.ratio]
        return self._selected or SelectedGroups(None, groups.num_visible, groups, self._backend)

    def _write_groups(self) -> None:
        projected, cache = self._projected, self._cache
        values = projected.group_kv, projected.group_gate
        self._compress(self._compressor, *values, cache.groups, cache.states, cache.group_format)

    def _select(self) -> None:
        projected, cache = self._projected, self._cache
        sizes, indexer = self._config.indexer, self._compressor.indexer
        if sizes is None or cache.index_keys is None:
            return
        self._compress(indexer, projected.index_kv, projected.index_gate, cache.index_keys, cache.index_states)
        q, weights = self._index_queries(indexer, sizes, cache.index_keys)
        self._selected = self._select_among_all(q, weights, cache.index_keys, sizes.topk)

    def _select_among_all(
        self, q: torch.Tensor, weights: torch.Tensor, index_keys: torch.Tensor, topk: int
    ) -> SelectedGroups:
        groups = self._step.groups[self._config.ratio]
        indices = paged_index_select(
            q.unsqueeze(1), index_keys, weights, groups.num_visible, groups.token_table, topk, backend=self._backend
        )
        return SelectedGroups(indices, groups.num_visible.clamp_max(topk), groups, self._backend)

    def _compress(
        self,
        module: Any,
        kv: torch.Tensor,
        gate: torch.Tensor,
        cache: torch.Tensor | None,
        states: torch.Tensor | None,
        cache_format: CacheFormat | None = None,
    ) -> None:
        step, groups = self._step, self._step.groups[self._config.ratio]
        if cache is None or states is None:
            return
        compress(
            kv,
            gate,
            module.position_bias.float(),
            norm_weight(module, "kv_norm"),
            self._table,
            step.request_ids,
            step.positions,
            cache,
            groups.slots,
            state_cache=states,
            state_table=groups.state_table,
            eps=self._config.rms_norm_eps,
            cache_format=cache_format,
            backend=self._backend,
        )

    def _index_queries(
        self, indexer: Any, sizes: V4IndexerConfig, index_keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [T, H, head_dim] in the keys' query dtype, and float32 head weights [T, H]."""
        table, positions, weights = self._table, self._step.rotary_positions, self._projected.index_weights
        q = indexer.q_b_proj(self._q_latent).unflatten(-1, (-1, sizes.head_dim))
        _, layout = as_index_cache(index_keys, sizes.head_dim, "cache.index_keys")
        if layout.scale_bytes:
            return index_query(
                q,
                weights,
                table,
                positions,
                rope_first=False,
                interleaved=True,
                smallest_amax=1e-4,
                scale_rounding="power_of_two",
                backend=self._backend,
            )
        tail = q[..., sizes.head_dim - table.shape[1] :]
        rotate_heads(tail, Rotary(table, positions, interleaved=True), out=tail, backend=self._backend)
        return q.to(layout.record_dtype), weights.float() * (sizes.head_dim * sizes.num_heads) ** -0.5
