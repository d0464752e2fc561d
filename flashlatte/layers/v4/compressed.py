"""A layer's groups in a step: those that it finishes are written, and each token selects among those it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.kv_cache.index_formats import as_index_cache
from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v4.config import V4Config, V4IndexerConfig
from flashlatte.layers.v4.modules import Projected
from flashlatte.layers.v4.step import V4Groups, V4Step
from flashlatte.ops.compress import compress
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.index_query import index_query
from flashlatte.ops.index_select import paged_index_select
from flashlatte.ops.norm_rope import rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary


@dataclass(frozen=True)
class SelectedGroups:
    """The groups that tokens attend to.

    Attributes:
        numbers: int32 [T, topk], of groups of the token's own request, ascending, then -1. None: all that it sees.
        counts: int32 [T], how many.
        groups: of the step.
        backend: of conversions.
    """

    numbers: torch.Tensor | None
    counts: torch.Tensor
    groups: V4Groups
    backend: str | None

    def slots(self, tokens: slice) -> torch.Tensor:
        """int32 [n, any], the slots of some tokens' groups, then -1."""
        if self.numbers is None:
            return self.groups.all_slots[tokens]
        groups = self.groups
        return index_convert(
            self.numbers[tokens],
            groups.table,
            groups.page_size,
            request_ids=groups.request_ids[tokens],
            backend=self.backend,
        )

    def numbers_below(self, most: int, tokens: slice) -> torch.Tensor:
        """int32 [n, any], the groups of some tokens, of which none is ``most`` or above, then -1."""
        if self.numbers is not None:
            return self.numbers[tokens]
        every = torch.arange(most, dtype=torch.int32, device=self.counts.device)
        return every.where(every < self.counts[tokens].unsqueeze(1), -1)


def select_groups(
    compressor: Any,
    config: V4Config,
    projected: Projected,
    q_latent: torch.Tensor,
    step: V4Step,
    cache: V4Cache,
    table: torch.Tensor,
    backend: str | None,
) -> SelectedGroups | None:
    """Write the groups that the step finishes, and select; None in a layer without groups.

    Args:
        compressor: position_bias, kv_norm, and an indexer where the layer has one.
        q_latent: [T, q_lora_rank], normalised.
        table: float32 cosines and sines of the layer.
    """
    if config.ratio == 0 or cache.groups is None or cache.states is None:
        return None
    groups = step.groups[config.ratio]
    states = cache.groups, cache.states
    _compress(compressor, config, projected.group_kv, projected.group_gate, step, groups, *states, table, backend)
    if config.indexer is None or cache.index_keys is None or cache.index_states is None:
        return SelectedGroups(None, groups.seen, groups, backend)
    indexer = compressor.indexer
    states = cache.index_keys, cache.index_states
    _compress(indexer, config, projected.index_kv, projected.index_gate, step, groups, *states, table, backend)
    weights = projected.index_weights
    q, weights = _index_queries(indexer, config.indexer, weights, q_latent, cache.index_keys, table, step, backend)
    topk = config.indexer.topk
    numbers = paged_index_select(
        q.unsqueeze(1),
        cache.index_keys,
        weights,
        groups.seen,
        groups.table[step.request_ids.clamp(0, groups.table.shape[0] - 1)],
        topk,
        backend=backend,
    )
    return SelectedGroups(numbers, groups.seen.clamp_max(topk), groups, backend)


def _compress(
    module: Any,
    config: V4Config,
    kv: torch.Tensor,
    gate: torch.Tensor,
    step: V4Step,
    groups: V4Groups,
    cache: torch.Tensor,
    states: torch.Tensor,
    table: torch.Tensor,
    backend: str | None,
) -> None:
    compress(
        kv,
        gate,
        module.position_bias.float(),
        module.kv_norm.weight,
        table,
        step.request_ids,
        step.positions,
        cache,
        groups.slots,
        state_cache=states,
        state_table=groups.state_table,
        eps=config.rms_norm_eps,
        backend=backend,
    )


def _index_queries(
    indexer: Any,
    sizes: V4IndexerConfig,
    weights: torch.Tensor,
    q_latent: torch.Tensor,
    index_keys: torch.Tensor,
    table: torch.Tensor,
    step: V4Step,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, H, head_dim] in the dtype that goes with the keys, and float32 head weights [T, H]."""
    q = indexer.q_b_proj(q_latent).unflatten(-1, (-1, sizes.head_dim))
    _, layout = as_index_cache(index_keys, sizes.head_dim, "cache.index_keys")
    if layout.scale_bytes:
        return index_query(
            q,
            weights,
            table,
            step.rotary_positions,
            rope_first=False,
            interleaved=True,
            smallest_amax=1e-4,
            scale_rounding="power_of_two",
            backend=backend,
        )
    tail = q[..., sizes.head_dim - table.shape[1] :]
    rotate_heads(tail, Rotary(table, step.rotary_positions, interleaved=True), out=tail, backend=backend)
    return q.to(layout.record_dtype), weights.float() * (sizes.head_dim * sizes.num_heads) ** -0.5
