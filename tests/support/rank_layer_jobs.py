"""A small MLA layer in several steps, by one process or by each rank."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from flashlatte import kv_cache
from flashlatte.distributed import ContextParallel, TensorParallelAttention, shard_metadata
from flashlatte.layers import IndexerConfig, MLAAttention, MLAConfig, MLAMetadataBuilder

# New tokens of each request in each step: prompts, a token each, drafts of different lengths, a late request, and more
# of two prompts beside a token.
STEPS = (
    {0: 13, 1: 1, 2: 20},
    {0: 1, 1: 1, 2: 1},
    {0: 3, 1: 2, 2: 4},
    {2: 1, 1: 1, 3: 9},
    {0: 1, 1: 3, 2: 1, 3: 1},
    {1: 1, 3: 11, 2: 6, 0: 17},
    {0: 1, 1: 0, 2: 4, 3: 1},
)
PAGE_TOKENS, REQUESTS, TOPK = 48, 4, 8
# Chunks of a prefill over cached tokens begin and end within a request, and a request is longer than one.
PLAN: dict[str, Any] = {"max_decode_queries": 4, "workspace_tokens": 10, "gather_tokens": 24, "logit_bytes": 300}


def config(heads: int = 8, index_format: str | None = None) -> MLAConfig:
    indexer = IndexerConfig(num_heads=32, head_dim=32, topk=TOPK) if index_format else None
    return MLAConfig(
        indexer=indexer,
        hidden_size=64,
        num_attention_heads=heads,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        attention_bias=True,
    )


def weights(sizes: MLAConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    layer = MLAAttention(sizes)
    return {name: torch.randn_like(value) / value.shape[-1] ** 0.5 for name, value in layer.state_dict().items()}


def run(
    layer: Any, sizes: MLAConfig, page_size: int, context: ContextParallel | None, index_format: str | None
) -> tuple[list[torch.Tensor], int]:
    """The layer's output of every step, and the number of tokens in its cache. All ranks use the same seed."""
    generator = torch.Generator().manual_seed(3)
    cache, index_cache, topk = torch.full((16, page_size, 1, 40), torch.nan), None, None
    if sizes.indexer is not None and index_format is not None:
        index_cache, topk = kv_cache.allocate(index_format, 16, page_size, head_dim=32), sizes.indexer.topk
        index_cache.view(torch.uint8).fill_(255)  # NaN
    builder = MLAMetadataBuilder(
        PAGE_TOKENS, REQUESTS, 64, 2 * PAGE_TOKENS, "cpu", cache_format="fp32", num_pages=16, topk=topk, **PLAN
    )
    table = torch.randperm(16, generator=generator)[: 2 * REQUESTS].view(REQUESTS, 2)
    done, results = [0] * REQUESTS, []
    for step in STEPS:
        for request, count in step.items():
            done[request] += count
        starts = [0, *itertools.accumulate(step.values())]
        metadata = builder.build(starts, [done[request] for request in step], table[list(step)])
        if context is not None:
            metadata = shard_metadata(metadata, context)
        results.append(
            layer(torch.randn(starts[-1], 64, generator=generator), cache, metadata, index_cache=index_cache)
        )
    return results, int((~cache[..., 0].isnan()).sum())


def whole(heads: int = 8, index_format: str | None = None) -> list[torch.Tensor]:
    sizes = config(heads, index_format)
    layer = MLAAttention(sizes)
    layer.load_weights(weights(sizes))
    return run(layer, sizes, PAGE_TOKENS, None, index_format)[0]


def divided(kv_ranks: int, heads: int = 8, index_format: str | None = None) -> tuple[list[torch.Tensor], int]:
    """``run`` with heads over all ranks and keys over groups of ``kv_ranks`` ranks; and the tokens stored on this
    rank."""
    sizes = config(heads, index_format)
    layer = TensorParallelAttention(sizes)
    layer.layer.load_weights(weights(sizes))
    context = None
    if kv_ranks > 1:
        ranks, size = dist.get_rank() // kv_ranks * kv_ranks, dist.get_world_size()
        groups = [dist.new_group(range(first, first + kv_ranks)) for first in range(0, size, kv_ranks)]
        context = ContextParallel(groups[ranks // kv_ranks], interleave=2)  # type: ignore[arg-type]
    return run(layer, sizes, PAGE_TOKENS // kv_ranks, context, index_format)
