"""A small MLA layer in several steps, by one process or by each rank."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from flashlatte.distributed import ContextParallel, TensorParallelAttention, shard_metadata
from flashlatte.layers import MLAAttention, MLAConfig, MLAMetadataBuilder

# New tokens of three requests in each step: prompts, a token each, drafts of different lengths, a late request.
STEPS = ({0: 13, 1: 1, 2: 20}, {0: 1, 1: 1, 2: 1}, {0: 3, 1: 2, 2: 4}, {2: 1, 1: 1, 3: 9}, {0: 1, 1: 3, 2: 1, 3: 1})
PAGE_TOKENS, REQUESTS = 48, 4


def config(heads: int = 8) -> MLAConfig:
    return MLAConfig(
        hidden_size=64,
        num_attention_heads=heads,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        attention_bias=True,
    )


def weights(heads: int = 8) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    layer = MLAAttention(config(heads))
    drawn = {name: torch.randn_like(value) / value.shape[-1] ** 0.5 for name, value in layer.state_dict().items()}
    return drawn


def run(layer: Any, cache: torch.Tensor, context: ContextParallel | None) -> list[torch.Tensor]:
    """The layer's output of every step. Tokens are drawn from the same seed by whoever asks."""
    generator = torch.Generator().manual_seed(3)
    builder = MLAMetadataBuilder(PAGE_TOKENS, REQUESTS, 64, 2 * PAGE_TOKENS, "cpu", num_pages=16, max_decode_queries=4)
    table = torch.randperm(16, generator=generator)[: 2 * REQUESTS].view(REQUESTS, 2)
    done, results = [0] * REQUESTS, []
    for step in STEPS:
        for request, count in step.items():
            done[request] += count
        starts = [0, *itertools.accumulate(step.values())]
        metadata = builder.build(starts, [done[request] for request in step], table[list(step)])
        if context is not None:
            metadata = shard_metadata(metadata, context)
        results.append(layer(torch.randn(starts[-1], 64, generator=generator), cache, metadata))
    return results


def whole(heads: int = 8) -> list[torch.Tensor]:
    layer = MLAAttention(config(heads))
    layer.load_weights(weights(heads))
    return run(layer, empty_cache(PAGE_TOKENS), None)


def divided(keys_over: int, heads: int = 8) -> tuple[list[torch.Tensor], int]:
    """Heads over all ranks, keys over groups of ``keys_over`` of them; and how many tokens this rank has stored."""
    layer = TensorParallelAttention(config(heads))
    layer.layer.load_weights(weights(heads))
    context = None
    if keys_over > 1:
        ranks, size = dist.get_rank() // keys_over * keys_over, dist.get_world_size()
        groups = [dist.new_group(range(first, first + keys_over)) for first in range(0, size, keys_over)]
        context = ContextParallel(groups[ranks // keys_over], interleave=2)  # type: ignore[arg-type]
    cache = empty_cache(PAGE_TOKENS // keys_over)
    results = run(layer, cache, context)
    return results, int((~cache[..., 0].isnan()).sum())


def empty_cache(page_size: int) -> torch.Tensor:
    return torch.full((16, page_size, 1, 40), torch.nan)


def of_a_step_with_a_context() -> None:
    builder = MLAMetadataBuilder(PAGE_TOKENS, 1, 64, 96, "cpu", num_pages=16, max_decode_queries=1)
    context = ContextParallel()
    shard_metadata(builder.build([0, 9], [20], torch.zeros(1, 1, dtype=torch.int32)), context)
