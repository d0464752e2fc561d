"""A decode step of DeepSeek-V3's attention layer on several GPUs, compared with one GPU.

    torchrun --nproc-per-node 4 -m flashlatte bench distributed-layer [--batch 64] [--keys 8192] [--json FILE]

"heads": heads divided over the ranks, every token's latent on each of them. "heads and keys": a token's latent on one.
bf16, in CUDA graphs; each is checked against one GPU. Times are medians of alternating replays, of the slowest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from flashlatte import kv_cache
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.distributed.ranks import REPLAYS, alternating_ms, captured, check, report
from flashlatte.bench.layers.mla import V3
from flashlatte.bench.layers.steps import DTYPE, randomize
from flashlatte.distributed import ContextParallel, TensorParallelAttention, shard_metadata
from flashlatte.layers import MLAAttention, MLAMetadataBuilder

PAGE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=64, help="requests (default 64)")
    parser.add_argument("--keys", type=int, default=8192, help="tokens of each request (default 8192)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    with torch.inference_mode():
        return report(lambda: [figures(options.batch, options.keys)], options.json)


def figures(batch: int, keys: int) -> dict[str, object]:
    generator = torch.Generator("cuda").manual_seed(0)
    context = ContextParallel(interleave=1)
    whole = MLAAttention(V3, dtype=DTYPE, device="cuda")
    randomize(whole, generator)
    divided = TensorParallelAttention(V3, dtype=DTYPE, device="cuda")
    divided.layer.load_weights(dict(whole.named_parameters()))

    tokens = torch.randn(batch * keys, 576, device="cuda", dtype=DTYPE, generator=generator)
    hidden = torch.randn(batch, V3.hidden_size, device="cuda", dtype=DTYPE, generator=generator)
    calls: dict[str, Callable[[], torch.Tensor]] = {}

    def add(name: str, layer: Callable[..., torch.Tensor], ranks_of_a_page: int) -> None:
        page = PAGE * ranks_of_a_page
        builder = MLAMetadataBuilder(page, batch, batch, keys, "cuda", num_pages=batch * keys // page)
        table = torch.arange(batch * keys // page).view(batch, -1)
        metadata = builder.build(range(batch + 1), [keys] * batch, table)
        slots = torch.arange(batch * keys, device="cuda")
        if ranks_of_a_page > 1:
            metadata, slots = shard_metadata(metadata, context), context.sharding.local_slots(slots, page)
        cache = kv_cache.allocate("bf16", batch * keys // page, PAGE, device="cuda")
        kv_cache.write(cache, slots, tokens)
        calls[name] = lambda: layer(hidden, cache, metadata)

    add("one GPU", whole, 1)
    add("heads", divided, 1)
    add("heads and keys", divided, context.sharding.size)
    wanted = calls["one GPU"]().clone()
    for name, call in calls.items():
        check(call(), wanted, name, ulps=4)
    times = alternating_ms({name: captured(call) for name, call in calls.items()})
    one = times["one GPU"]
    line: dict[str, object] = {"batch": batch, "keys": keys}
    for name, time in times.items():
        line |= {f"{name}, us": round(time * 1e3 / REPLAYS, 1), f"{name}, times one GPU": round(one / time, 2)}
    return line
