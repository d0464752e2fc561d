"""A decode step of the MLA layer at DeepSeek-V3's size: time outside of matrix products and the attention kernel, and
for comparison the step of transformers' module, which expands its history.

    flashlatte bench mla-layer [--batch 64] [--keys 8192] [--stock-batch 8] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from flashlatte import kv_cache
from flashlatte.bench import timing
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.layers.steps import (
    DEVICE,
    DTYPE,
    MATMUL,
    by_part,
    capture_step,
    kernel_microseconds,
    randomize,
    report,
    slowest_first,
)
from flashlatte.layers import MLAAttention, MLAConfig, MLAMetadata, MLAMetadataBuilder, Rope, Yarn

PAGE_SIZE = 64
V3 = MLAConfig(
    hidden_size=7168,
    num_attention_heads=128,
    q_lora_rank=1536,
    rope=Rope(max_position=163840, yarn=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)),
)
PARTS = {"matmul": MATMUL, "attention": r"decode|combine|attention|schedule|plan|split"}


def random_layer(config: MLAConfig) -> MLAAttention:
    layer = MLAAttention(config, dtype=DTYPE, device=DEVICE)
    randomize(layer)
    return layer


def decode_step(batch: int, keys: int, cache_format: str, queries: int = 1) -> tuple[torch.Tensor, MLAMetadata]:
    """A cache of random rows, and the metadata of a step in which each request has ``keys`` tokens."""
    pages_each = -(-keys // PAGE_SIZE)
    pages = batch * pages_each
    rows = torch.randn(pages, PAGE_SIZE, 1, 576, dtype=DTYPE, device=DEVICE)
    cache = rows if cache_format == "bf16" else kv_cache.pack(rows, cache_format)
    tokens, table = batch * queries, torch.randperm(pages).view(batch, pages_each)
    builder = MLAMetadataBuilder(PAGE_SIZE, batch, tokens, keys, DEVICE, cache_format=cache_format, num_pages=pages)
    return cache, builder.build(range(0, tokens + 1, queries), [keys] * batch, table)


def measure_layer(layer: MLAAttention, batch: int, keys: int, cache_format: str, queries: int = 1) -> dict[str, Any]:
    cache, metadata = decode_step(batch, keys, cache_format, queries)
    hidden = torch.randn(batch * queries, V3.hidden_size, dtype=DTYPE, device=DEVICE)

    def step() -> torch.Tensor:
        return layer(hidden, cache, metadata, cache_format=cache_format)

    graph = capture_step(step)
    step_us = timing.device_microseconds(graph.replay)
    host_us = timing.host_microseconds(step)
    kernels = kernel_microseconds(graph)
    parts = by_part(kernels, PARTS)
    return {
        "what": "layer",
        "batch": batch,
        "keys": keys,
        "queries": queries,
        "cache_format": cache_format,
        "step_us": step_us,
        "host_us_without_graph": host_us,
        "matmul_us": parts["matmul"],
        "attention_us": parts["attention"],
        "rest_us": parts["rest"],
        "rest_share": parts["rest"] / sum(parts.values()),
        # Includes the time between kernels.
        "outside_share": 1 - (parts["matmul"] + parts["attention"]) / step_us,
        "kernels": slowest_first(kernels),
    }


def measure_stock(batch: int, keys: int) -> dict[str, Any]:
    """transformers' DeepseekV3Attention with its DynamicCache of latents, one more token."""
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as host

    config = DeepseekV3Config()
    config._attn_implementation = "sdpa"
    with torch.device(DEVICE):
        module = host.DeepseekV3Attention(config, layer_idx=0).to(DTYPE).eval().requires_grad_(False)
        rope = host.DeepseekV3RotaryEmbedding(config)
        hidden = torch.randn(batch, 1, config.hidden_size, dtype=DTYPE)
        latent = torch.randn(batch, 1, keys - 1, config.kv_lora_rank, dtype=DTYPE)
        k_rope = torch.randn(batch, 1, keys - 1, config.qk_rope_head_dim, dtype=DTYPE)
        positions = rope(hidden, torch.full((batch, 1), keys - 1))
    cache = DynamicCache()
    cache.update(latent, k_rope, 0)

    @torch.no_grad()
    def step() -> None:
        module(hidden, position_embeddings=positions, attention_mask=None, past_key_values=cache)
        cache.crop(-1)

    return {"what": "transformers", "batch": batch, "keys": keys, "step_us": timing.device_microseconds(step)}


def results(batch: int, keys: int, stock_batch: int) -> Iterator[dict[str, Any]]:
    layer = random_layer(V3)
    for cache_format in ("bf16", "v32"):
        yield measure_layer(layer, batch, keys, cache_format)
    yield measure_layer(layer, batch, keys, "bf16", queries=2)
    yield measure_layer(layer, stock_batch, keys, "bf16")
    del layer
    torch.cuda.empty_cache()
    yield measure_stock(stock_batch, keys)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=64, help="requests (default 64)")
    parser.add_argument("--keys", type=int, default=8192, help="tokens of each request (default 8192)")
    parser.add_argument("--stock-batch", type=int, default=8, help="requests of transformers' module (default 8)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    return report(results(options.batch, options.keys, options.stock_batch), PARTS, options)
