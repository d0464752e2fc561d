"""DeepSeek-V3.2's layer with its indexer, compared with dense attention: a decode step part by part, and a prefill.

    flashlatte bench dsa-layer [--section decode|lengths|prefill] [--json FILE]

decode: 64 requests of 32,768 tokens, and 8 of 131,072, in a CUDA graph. lengths: steps over contexts of growing length,
sparse over v32 and bf16 pages, dense over bf16. prefill: 32,768 tokens of one request in steps of 8,192.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from flashlatte import kv_cache
from flashlatte.bench import timing
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.layers.mla import V3, random_layer
from flashlatte.bench.layers.steps import DEVICE, DTYPE, MATMUL, capture_step, parts_of_step, report
from flashlatte.layers import IndexerConfig, MLAAttention, MLAMetadataBuilder
from flashlatte.ops.index_quantize import index_quantize

PAGE_SIZE = 64
V32 = dataclasses.replace(V3, indexer=IndexerConfig(scale_rounding="power_of_two"))
PARTS = {
    "matmul": MATMUL,
    "logits": r"paged_kernel|ragged_kernel|paged_logits|ragged_logits|index_logits|clean_",
    "topk": r"filter_kernel|finish_kernel|topk",
    "convert": r"index_convert",
    "quantize and write": r"index_quantize|index_query|write_tiles|write_rows|latent_rows|rotate_heads|layer_norm",
    "gather": r"gather",
    "attention": r"decode|combine|prefill|attention|forward_kernel|merge|schedule|plan|split",
}
SECTIONS = ("decode", "lengths", "prefill")
DECODE = ((64, 32768), (8, 131072))
LENGTHS = {64: (1024, 2048, 3072, 4096, 8192, 16384, 32768), 8: (2048, 4096, 8192, 16384, 32768, 65536, 131072)}
PREFILL_TOKENS, PREFILL_STEP = 32768, 8192


def random_caches(layer: MLAAttention, pages: int, cache_format: str) -> dict[str, Any]:
    cache = kv_cache.allocate(cache_format, pages, PAGE_SIZE, device=DEVICE)
    caches: dict[str, Any] = {"cache": cache, "cache_format": cache_format}
    if layer.indexer is not None:
        caches["index_cache"] = kv_cache.allocate("index_fp8", pages, PAGE_SIZE, head_dim=128, device=DEVICE)
    # In slices, since 16-bit rows of all tokens may exceed the memory.
    for slots in torch.arange(pages * PAGE_SIZE, device=DEVICE).split(2**18):
        kv_cache.write(
            cache, slots, torch.randn(len(slots), 576, dtype=DTYPE, device=DEVICE), cache_format=cache_format
        )
        if layer.indexer is not None:
            index_quantize(caches["index_cache"], slots, torch.randn(len(slots), 128, dtype=DTYPE, device=DEVICE))
    return caches


def builder_of(layer: MLAAttention, requests: int, tokens: int, keys: int, cache_format: str) -> MLAMetadataBuilder:
    topk = None if layer.config.indexer is None else layer.config.indexer.topk
    return MLAMetadataBuilder(PAGE_SIZE, requests, tokens, keys, DEVICE, cache_format=cache_format, topk=topk)


def measure_decode(layer: MLAAttention, batch: int, keys: int, cache_format: str, parts: bool = True) -> dict[str, Any]:
    pages_each = -(-keys // PAGE_SIZE)
    caches = random_caches(layer, batch * pages_each, cache_format)
    # Capacity for more tokens than are selected, so that the indexer selects at every length.
    builder = builder_of(layer, batch, batch, max(keys, 4096), cache_format)
    table = torch.randperm(batch * pages_each).view(batch, pages_each)
    metadata = builder.build(range(batch + 1), [keys] * batch, table)
    hidden = torch.randn(batch, V3.hidden_size, dtype=DTYPE, device=DEVICE)
    cache = caches.pop("cache")

    def step() -> torch.Tensor:
        return layer(hidden, cache, metadata, **caches)

    graph = capture_step(step)
    result: dict[str, Any] = {
        "what": "decode",
        "attention": "dense" if layer.indexer is None else "sparse",
        "cache_format": cache_format,
        "batch": batch,
        "keys": keys,
        "step_us": timing.device_microseconds(graph.replay),
    }
    return result | parts_of_step(graph, PARTS, ("matmul", "logits", "topk", "attention")) if parts else result


def measure_prefill(layer: MLAAttention, cache_format: str) -> dict[str, Any]:
    pages = PREFILL_TOKENS // PAGE_SIZE
    caches = random_caches(layer, pages, cache_format)
    cache = caches.pop("cache")
    builder = builder_of(layer, 1, PREFILL_STEP, PREFILL_TOKENS, cache_format)
    table, steps = torch.randperm(pages)[None], []
    hidden = torch.randn(PREFILL_STEP, V3.hidden_size, dtype=DTYPE, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for last in range(PREFILL_STEP, PREFILL_TOKENS + 1, PREFILL_STEP):
        metadata = builder.build([0, PREFILL_STEP], [last], table)
        steps.append(timing.device_microseconds(lambda metadata=metadata: layer(hidden, cache, metadata, **caches)))
    return {
        "what": "prefill",
        "attention": "dense" if layer.indexer is None else "sparse",
        "cache_format": cache_format,
        "tokens": PREFILL_TOKENS,
        "steps_us": [round(us) for us in steps],
        "total_us": sum(steps),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
    }


def results(sections: set[str]) -> Iterator[dict[str, Any]]:
    sparse, dense = random_layer(V32), random_layer(V3)
    choices = ((sparse, "v32"), (sparse, "bf16"), (dense, "bf16"))
    if "decode" in sections:
        for batch, keys in DECODE:
            for layer, cache_format in choices:
                yield measure_decode(layer, batch, keys, cache_format)
                torch.cuda.empty_cache()
    if "lengths" in sections:
        for batch, lengths in LENGTHS.items():
            for keys in lengths:
                for layer, cache_format in choices:
                    yield measure_decode(layer, batch, keys, cache_format, parts=False)
                    torch.cuda.empty_cache()
    if "prefill" in sections:
        for layer, cache_format in choices:
            yield measure_prefill(layer, cache_format)
            torch.cuda.empty_cache()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--section", choices=SECTIONS, action="append", help="default: all (may be repeated)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    return report(results(set(options.section or SECTIONS)), PARTS, options)
