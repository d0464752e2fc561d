"""Random tensors, drawn on their device, in chunks if a temporary of the whole tensor would not fit."""

from __future__ import annotations

from statistics import NormalDist

import torch

from flashlatte import kv_cache

STD = 0.1
CHUNK_ELEMENTS = 2**26


def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def normal(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """randn / 10."""
    return torch.empty(shape, dtype=dtype, device=rng.device).normal_(0.0, STD, generator=rng)


def integers(low: int, high: int, count: int, rng: torch.Generator) -> torch.Tensor:
    """int32 [count], from ``low`` to ``high`` - 1."""
    return torch.randint(low, high, (count,), dtype=torch.int32, device=rng.device, generator=rng)


def varying_lengths(mean: int, count: int, at_least: int, rng: torch.Generator) -> torch.Tensor:
    """int32 lengths in random order, the quantiles of N(mean, mean / 2), at least ``at_least``."""
    distribution = NormalDist(mean, mean / 2)
    lengths = [max(round(distribution.inv_cdf((i + 0.5) / count)), at_least) for i in range(count)]
    return _shuffled(lengths, rng)


def even_lengths(low: int, high: int, count: int, rng: torch.Generator) -> torch.Tensor:
    """int32 lengths from ``low`` to ``high``, evenly spread, in random order."""
    return _shuffled([round(low + (high - low) * (i + 0.5) / count) for i in range(count)], rng)


def block_table(batch: int, pages_each: int, rng: torch.Generator) -> torch.Tensor:
    """int32 [batch, pages_each]: all pages of a cache of batch · pages_each, in random order."""
    order = torch.randperm(batch * pages_each, generator=rng, device=rng.device)
    return order.view(batch, pages_each).int()


def distinct(rows: int, population: int, count: int, rng: torch.Generator) -> torch.Tensor:
    """int64 [rows, count]: in each row, ``count`` different integers below ``population``, in random order."""
    chosen = torch.empty(rows, count, dtype=torch.int64, device=rng.device)
    step = max(CHUNK_ELEMENTS // population, 1)
    for begin in range(0, rows, step):
        keys = torch.rand(min(step, rows - begin), population, generator=rng, device=rng.device)
        chosen[begin : begin + step] = keys.topk(count, dim=-1).indices
    return chosen


def drifting(rows: int, population: int, count: int, overlap: float, rng: torch.Generator) -> torch.Tensor:
    """As ``distinct``, with a share ``overlap`` of each row's integers from the row before, if above 0."""
    if overlap == 0:
        return distinct(rows, population, count, rng)
    order = torch.randperm(population, generator=rng, device=rng.device)
    new = round(count * (1 - overlap))
    row, column = (torch.arange(n, device=rng.device) for n in (rows, count))
    return order[(row[:, None] * new + column) % population]


def quantized_cache(cache_format: str, pages: int, page_size: int, rng: torch.Generator) -> torch.Tensor:
    """A cache in this format filled with quantized randn / 10."""
    layout = kv_cache.get_format(cache_format)
    cache = kv_cache.allocate(layout, pages, page_size, device=rng.device)
    step = max(CHUNK_ELEMENTS // (page_size * layout.head_dim), 1)
    for begin in range(0, pages, step):
        part = cache[begin : begin + step]
        rows = normal((part.shape[0], page_size, 1, layout.head_dim), torch.bfloat16, rng)
        packed = kv_cache.pack(rows, layout)
        for target, source in zip(layout.page_views(part), layout.page_views(packed), strict=True):
            target.copy_(source)
    return cache


def _shuffled(values: list[int], rng: torch.Generator) -> torch.Tensor:
    order = torch.randperm(len(values), generator=rng, device=rng.device)
    return torch.tensor(values, dtype=torch.int32, device=rng.device)[order]
