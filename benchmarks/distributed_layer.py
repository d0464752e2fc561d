"""A decode step of DeepSeek-V3's attention layer on several GPUs, beside the same on one.

    PYTHONPATH=. torchrun --nproc-per-node 4 benchmarks/distributed_layer.py [--batch 64] [--keys 8192] [--json FILE]

"heads": heads divided over the ranks, every token's latent on each of them. "heads and keys": a token's latent on one.
bf16, in CUDA graphs; each is checked against one GPU. Times are medians in turns, of the slowest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from mla_layer import V3
from ranks import REPLAYS, captured, check, in_turns, report

from flashlatte import kv_cache
from flashlatte.distributed import ContextParallel, TensorParallelAttention, shard_metadata
from flashlatte.layers import MLAAttention, MLAMetadataBuilder

PAGE, DTYPE = 64, torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--keys", type=int, default=8192, help="of each request")
    parser.add_argument("--json", type=Path, help="append a line to this file")
    arguments = parser.parse_args()
    with torch.inference_mode():
        report(lambda: [figures(arguments.batch, arguments.keys)], arguments.json)


def figures(batch: int, keys: int) -> dict[str, object]:
    generator = torch.Generator("cuda").manual_seed(0)
    context = ContextParallel(interleave=1)
    whole = MLAAttention(V3, dtype=DTYPE, device="cuda")
    for weight in whole.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        else:
            weight.fill_(1.0)
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
    times = in_turns({name: captured(call) for name, call in calls.items()})
    one = times["one GPU"]
    line: dict[str, object] = {"batch": batch, "keys": keys}
    for name, time in times.items():
        line |= {f"{name}, us": round(time * 1e3 / REPLAYS, 1), f"{name}, times one GPU": round(one / time, 2)}
    return line


if __name__ == "__main__":
    main()
