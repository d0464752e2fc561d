"""Error of attention over quantized key-value caches by length: on a CPU, with the reference.

    flashlatte bench cache-quantization [--json FILE]

One new token attends to a request of 128 to 32,768 tokens, 8 query heads over 2 key heads of 128 elements. Keys are
normal, with four channels per head that are 10 times as large and not centered at zero, as rotated keys of real models
have them; values have two channels 5 times as large; a query is close to some keys, so that its weights differ. Errors
are against the same keys and values in bf16.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashlatte import paged_attention, reshape_and_cache, turboquant_decode, turboquant_store
from flashlatte.bench import environment
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.results import append_line
from flashlatte.kv_cache import turboquant

LENGTHS = (128, 512, 2048, 8192, 32768)
REQUESTS, H_Q, H_KV, D, PAGE_SIZE = 4, 8, 2, 128, 16
KEY_OUTLIERS, VALUE_OUTLIERS = (3, 40, 77, 101), (9, 60)
Attention = Callable[..., torch.Tensor]  # of q, key and value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    about = dataclasses.asdict(environment.describe(torch.device("cpu")))
    for line in (line for length in LENGTHS for line in measure(length)):
        print("{cache:<22}{length:>7}  cosine {cosine:.5f}  largest error {largest_error:.4f}".format(**line))
        append_line(options.json, line | about)
    return 0


def measure(length: int) -> list[dict[str, object]]:
    """A line for each kind of cache: bytes per token and head, cosine similarity, and the largest error relative to
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
    """q [1, h_q, d], key and value [length, h_kv, d], bf16 values in float32."""
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
    """Attention over keys and values in ``dtype``; ``each``: a scale per token and head instead of one."""
    table, lengths = _pages(key.shape[0])
    shape = (table.shape[1], PAGE_SIZE, H_KV)
    k_cache, v_cache = (torch.zeros(*shape, D).to(dtype) for _ in range(2))
    scales: dict[str, Any] = {}
    if dtype != torch.float32:
        largest = 448.0 if dtype == torch.float8_e4m3fn else 127.0
        scales = {
            name: torch.zeros(shape) if each else rows.abs().max().reshape(1) / largest
            for name, rows in (("k_scale", key), ("v_scale", value))
        }
    reshape_and_cache(key, value, k_cache, v_cache, torch.arange(key.shape[0]), **scales)
    out, _ = paged_attention(q, k_cache, v_cache, table, lengths, torch.tensor([0, 1]), **scales)
    return out[0]


def _turboquant(name: str, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    table, lengths = _pages(key.shape[0])
    cache = turboquant.allocate(name, table.shape[1], PAGE_SIZE, H_KV, D)
    turboquant_store(key, value, cache, torch.arange(key.shape[0]))
    return turboquant_decode(q.unsqueeze(0), cache, table, lengths)[0][0, 0]


FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Bytes per token and head, of keys, values and scales, and attention over such a cache.
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
