"""A decode step of DeepSeek-V4's layers, part by part: 64 requests of 65,536 tokens in a CUDA graph.

    PYTHONPATH=. python benchmarks/v4_layer.py [--json FILE]

Layers of DeepSeek-V4-Flash over model1, with groups of 4 tokens and of 128. What the layers of a step share
(``V4Step.build``) is timed by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from layer_steps import DEVICE, MATMUL, by_part, captured, kernel_microseconds, report, slowest_first

from flashlatte.bench import timing
from flashlatte.layers.v4 import V4Attention, V4Cache, V4Config, V4IndexerConfig, V4Step

DTYPE, PAGE_SIZE, STATE_PAGE_SIZE = torch.bfloat16, 64, 4
BATCH, TOKENS = 64, 65536
PARTS = {
    "matmul": MATMUL,
    "indexer": r"index_logits|\bpaged_kernel|clean_paged|topk|\bfilter_kernel|\bfinish_kernel|index_query",
    "attention": r"sparse_decode|combine|merge",
    "groups": r"compress_",
    "norms, rotation and caches": r"q_kv_norm|rotate_",
}
NAMED = ("matmul", "indexer", "attention")


def layer_of(ratio: int) -> V4Attention:
    rope = dataclasses.replace(V4Config().rope, max_position=TOKENS)
    config = V4Config(ratio=ratio, indexer=V4IndexerConfig() if ratio == 4 else None, rope=rope)
    layer = V4Attention(config, dtype=DTYPE, device=DEVICE)
    for weight in layer.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight.shape[-1] ** -0.5)
        else:
            weight.fill_(1.0)
    return layer


def pages_of(requests: int, each: int) -> torch.Tensor:
    return torch.randperm(requests * each, device=DEVICE, dtype=torch.int32).view(requests, each)


def measure(layer: V4Attention, batch: int = BATCH, tokens: int = TOKENS) -> dict[str, Any]:
    config = layer.config
    group_pages = -(-tokens // config.ratio // PAGE_SIZE)
    state_pages = (1 + config.overlap) * config.ratio // STATE_PAGE_SIZE
    cache = V4Cache.allocate(
        config,
        batch * tokens // PAGE_SIZE,
        PAGE_SIZE,
        group_pages=batch * group_pages,
        state_pages=batch * state_pages,
        state_page_size=STATE_PAGE_SIZE,
        device=DEVICE,
    )
    for pages in (cache.window, cache.groups, cache.index_keys):
        if pages is not None:
            # Bytes of moderate numbers in all that a row has: e4m3, bf16, powers of two and float32.
            pages.random_(0x30, 0x40)
    table, groups = pages_of(batch, tokens // PAGE_SIZE), (pages_of(batch, group_pages), pages_of(batch, state_pages))
    ids = torch.arange(batch, device=DEVICE)
    # As many groups end as do in any step.
    positions = tokens - config.ratio - 1 + ids % config.ratio
    hidden = torch.randn(batch, config.hidden_size, dtype=DTYPE, device=DEVICE)

    def build() -> V4Step:
        step = V4Step.build(ids, positions, table, {config.ratio: groups}, page_size=PAGE_SIZE)
        if config.indexer is None:
            # Kept by the first layer that attends to all groups.
            assert step.groups[config.ratio].all_slots is not None
        return step

    step = build()
    graph = captured(lambda: layer(hidden, step, cache))
    kernels = kernel_microseconds(graph)
    times = by_part(kernels, PARTS)
    return {
        "what": "decode",
        "ratio": config.ratio,
        "batch": batch,
        "tokens": tokens,
        "step_us": timing.device_microseconds(graph.replay),
        "build_us": timing.device_microseconds(captured(build).replay),
        "parts_us": {part: round(us, 2) for part, us in times.items()},
        "other_share": 1 - sum(times[part] for part in NAMED) / sum(times.values()),
        "kernels": slowest_first(kernels),
    }


def results() -> Iterator[dict[str, Any]]:
    for ratio in (4, 128):
        yield measure(layer_of(ratio))
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", help="append one JSON line a result to this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report(results(), PARTS, arguments.json)


if __name__ == "__main__":
    main()
