"""What quantised key-value caches do to the output of attention, by length: on a CPU, with the reference.

    PYTHONPATH=. python benchmarks/cache_quantisation.py [--json benchmarks/cache_quantisation.jsonl]

One new token attends to a request of 128 to 32,768 tokens, 8 query heads over 2 key heads of 128 numbers. Keys are
normal, with four channels of each head that are 10 times as large and off zero, as rotary keys of real models have
them; values have two channels 5 times as large; a query is near some keys, so that its weights are not all alike.
Errors are against the same keys and values in bf16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from flashlatte import paged_attention, reshape_and_cache, turboquant_decode, turboquant_store
from flashlatte.kv_cache import turboquant

LENGTHS = (128, 512, 2048, 8192, 32768)
REQUESTS, H_Q, H_KV, D, PAGE_SIZE = 4, 8, 2, 128, 16
KEY_OUTLIERS, VALUE_OUTLIERS = (3, 40, 77, 101), (9, 60)
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines = [line for length in LENGTHS for line in measure(length)]
    for line in lines:
        print("{cache:<22}{length:>7}  cosine {cosine:.5f}  largest error {largest_error:.4f}".format(**line))
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure(length: int) -> list[dict[str, object]]:
    """A line for each kind of cache: bytes of a token's head, cosine similarity, and the largest error, as a share of
    the root mean square of the output."""
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in CACHES}
    for seed in range(REQUESTS):
        q, key, value = draw(length, seed)
        for name, (_, attention) in CACHES.items():
            outputs[name].append(attention(q, key, value))
    exact = torch.stack(outputs["bf16"])
    lines = []
    for name, (size, _) in CACHES.items():
        out = torch.stack(outputs[name])
        cosine = torch.nn.functional.cosine_similarity(out, exact, dim=-1).mean()
        largest = (out - exact).abs().max() / exact.square().mean().sqrt()
        line = {"cache": name, "bytes": size, "length": length}
        lines.append(line | {"cosine": round(cosine.item(), 6), "largest_error": round(largest.item(), 5)})
    return lines


def draw(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [1, h_q, d], key and value [length, h_kv, d], bf16 numbers in float32."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    key, value = torch.randn(2, length, H_KV, D, generator=generator)
    offsets = torch.randn(H_KV, len(KEY_OUTLIERS), generator=generator)
    key[..., KEY_OUTLIERS] = key[..., KEY_OUTLIERS] * 3 + 10 * offsets.sign()
    value[..., VALUE_OUTLIERS] *= 5
    near = torch.randint(0, length, (H_Q,), generator=generator)
    heads = torch.arange(H_Q) // (H_Q // H_KV)
    q = torch.randn(H_Q, D, generator=generator) + 0.5 * key[near, heads] / key[near, heads].std(dim=-1, keepdim=True)
    return q.bfloat16().float().unsqueeze(0), key.bfloat16().float(), value.bfloat16().float()


def _pages(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(-(-length // PAGE_SIZE)).unsqueeze(0), torch.tensor([length])


def _one_byte(dtype: torch.dtype, each: bool, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention over keys and values in ``dtype``, with a scale for each token and head, or one for all."""
    table, lengths = _pages(key.shape[0])
    shape = (table.shape[1], PAGE_SIZE, H_KV)
    caches = [torch.zeros(*shape, D).to(dtype) for _ in range(2)]
    scales = {}
    if dtype != torch.float32:
        largest = 448.0 if dtype == torch.float8_e4m3fn else 127.0
        scales = {
            name: torch.zeros(shape) if each else rows.abs().max().reshape(1) / largest
            for name, rows in (("k_scale", key), ("v_scale", value))
        }
    reshape_and_cache(key, value, *caches, torch.arange(key.shape[0]), **scales)
    out, _ = paged_attention(q, *caches, table, lengths, torch.tensor([0, 1]), **scales)
    return out[0]


def _turboquant(name: str, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    table, lengths = _pages(key.shape[0])
    cache = turboquant.allocate(name, table.shape[1], PAGE_SIZE, H_KV, D)
    turboquant_store(key, value, cache, torch.arange(key.shape[0]))
    return turboquant_decode(q.unsqueeze(0), cache, table, lengths)[0][0, 0]


FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Bytes of a token's head, keys and values and their scales, and attention over such a cache.
CACHES: dict[str, tuple[int, Attention]] = {
    "bf16": (512, partial(_one_byte, torch.float32, False)),
    "fp8": (256, partial(_one_byte, FP8, False)),
    "fp8, token and head": (264, partial(_one_byte, FP8, True)),
    "int8, token and head": (264, partial(_one_byte, INT8, True)),
    **{
        name: (turboquant.turboquant_format(name, D).record_bytes, partial(_turboquant, name))
        for name in turboquant.TURBOQUANT_NAMES
    },
}


if __name__ == "__main__":
    main()
