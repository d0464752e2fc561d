"""Runs the step shapes of DeepSeek-V4.1's attention, to compile or list the kernels that they launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from flashlatte.kv_cache.v41 import V41Format, V41Fp4Format
from flashlatte.layers.v4.warmup import layer_steps, reduced, step_lengths
from flashlatte.layers.v41.attention import V41Attention
from flashlatte.layers.v41.cache import allocate_caches
from flashlatte.layers.v41.config import V41Config
from flashlatte.layers.v41.selection import SharedSelections
from flashlatte.layers.warmup import NoArithmetic


def warmup_steps(
    layers: Sequence[V41Config],
    *,
    cache_format: str = V41Format.name,
    dtype: torch.dtype = torch.bfloat16,
    ranks: int = 1,
    page_size: int = 64,
    max_batch: int = 256,
    max_queries: int = 2,
    device: str = "cpu",
) -> Iterator[str]:
    """Run prefill and decode steps of the layers that differ; yields the name of each. Results are uninitialized.

    Args:
        layers: configurations of the model's layers.
        cache_format: format of all caches. Beside ``v41``, groups in ``v41_fp4`` are run too.
        dtype, ranks, page_size, max_batch, max_queries, device: as for ``layers.v4.warmup.warmup_steps``.

    Raises:
        ValueError: a format that does not fit the layers.
    """
    configs = [reduced(config, ranks) for config in different_layers(layers)]
    modules = [V41Attention(config, dtype=dtype, device=device) for config in configs]
    of_groups = (None, V41Fp4Format.name) if cache_format == V41Format.name else (None,)
    for group_format in of_groups:
        caches = allocate_caches(
            configs, 1, page_size, cache_format=cache_format, group_format=group_format, device=device
        )
        for length in step_lengths(configs[0]):
            for name, step in layer_steps(configs, length, page_size, max_batch, max_queries, device):
                yield f"groups in {group_format or cache_format}, {name}, requests of {length} tokens"
                hidden = torch.zeros(step.num_tokens, configs[0].hidden_size, dtype=dtype, device=device)
                selections = SharedSelections()
                with NoArithmetic():
                    for module, cache in zip(modules, caches, strict=True):
                        module(hidden, step, cache, selections)


def different_layers(layers: Sequence[V41Config]) -> list[V41Config]:
    """The first layer of each kind and the layers that it reads, numbered anew."""
    kept: set[int] = set()
    seen = set()
    for config in layers:
        levels = config.candidates is not None, config.publishes_candidates
        kind = config.ratio, config.stores_groups, config.selects_groups, levels, config.rope
        if kind in seen:
            continue
        seen.add(kind)
        kept |= {config.layer, *_read_by(config, layers)}
    numbers = {layer: number for number, layer in enumerate(sorted(kept))}
    return [_renumbered(layers[layer], numbers) for layer in numbers]


def _read_by(config: V41Config, layers: Sequence[V41Config]) -> set[int]:
    """The layers whose groups, index keys, selections and candidates a layer reads, directly or not."""
    sources = {config.kv_source, config.index_source, None if config.candidates is None else config.candidates.source}
    direct = {source for source in sources if source is not None and source != config.layer}
    return direct.union(*(_read_by(layers[source], layers) for source in direct))


def _renumbered(config: V41Config, numbers: dict[int, int]) -> V41Config:
    candidates = config.candidates
    return replace(
        config,
        layer=numbers[config.layer],
        kv_source=None if config.kv_source is None else numbers[config.kv_source],
        index_source=None if config.index_source is None else numbers[config.index_source],
        candidates=None if candidates is None else replace(candidates, source=numbers[candidates.source]),
    )
