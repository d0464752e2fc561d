"""A decode step of DeepSeek-V4's layers, part by part: 64 requests of 65,536 tokens in a CUDA graph.

    flashlatte bench v4-layer [--json FILE]

Layers of DeepSeek-V4-Flash over model1, with groups of 4 tokens and of 128. The metadata that the layers of a step
share (``V4Step.build``) is timed separately.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from flashlatte.bench import timing
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.layers.steps import DEVICE, DTYPE, MATMUL, capture_step, parts_of_step, randomize, report
from flashlatte.layers.v4 import V4Attention, V4Cache, V4Config, V4IndexerConfig, V4Step

PAGE_SIZE, STATE_PAGE_SIZE = 64, 4
BATCH, TOKENS = 64, 65536
PARTS = {
    "matmul": MATMUL,
    "indexer": r"index_logits|\bpaged_kernel|clean_paged|topk|\bfilter_kernel|\bfinish_kernel|index_query",
    "attention": r"sparse_decode|combine|merge",
    "groups": r"compress_",
    "norms, rotation and caches": r"q_kv_norm|rotate_",
}
MAIN_PARTS = ("matmul", "indexer", "attention")


def layer_of(ratio: int) -> V4Attention:
    rope = dataclasses.replace(V4Config().rope, max_position=TOKENS)
    config = V4Config(ratio=ratio, indexer=V4IndexerConfig() if ratio == 4 else None, rope=rope)
    layer = V4Attention(config, dtype=DTYPE, device=DEVICE)
    randomize(layer)
    return layer


def pages_of(requests: int, each: int) -> torch.Tensor:
    return torch.randperm(requests * each, device=DEVICE, dtype=torch.int32).view(requests, each)


def measure(layer: V4Attention) -> dict[str, Any]:
    config, batch, tokens = layer.config, BATCH, TOKENS
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
            # Bytes that give moderate values in every field of a row: e4m3, bf16, powers of two and float32.
            pages.random_(0x30, 0x40)
    table, groups = pages_of(batch, tokens // PAGE_SIZE), (pages_of(batch, group_pages), pages_of(batch, state_pages))
    ids = torch.arange(batch, device=DEVICE)
    # As many groups end as in an average step.
    positions = tokens - config.ratio - 1 + ids % config.ratio
    hidden = torch.randn(batch, config.hidden_size, dtype=DTYPE, device=DEVICE)

    def build() -> V4Step:
        step = V4Step.build(ids, positions, table, {config.ratio: groups}, page_size=PAGE_SIZE)
        if config.indexer is None:
            # Kept by the first layer that attends to all groups.
            assert step.groups[config.ratio].all_slots is not None
        return step

    step = build()
    graph = capture_step(lambda: layer(hidden, step, cache))
    return {
        "what": "decode",
        "ratio": config.ratio,
        "batch": batch,
        "tokens": tokens,
        "step_us": timing.device_microseconds(graph.replay),
        "build_us": timing.device_microseconds(capture_step(build).replay),
        **parts_of_step(graph, PARTS, MAIN_PARTS),
    }


def results() -> Iterator[dict[str, Any]]:
    for ratio in (4, 128):
        yield measure(layer_of(ratio))
        torch.cuda.empty_cache()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    return report(results(), PARTS, options)
