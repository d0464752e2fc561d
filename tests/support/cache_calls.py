"""Calls of the implementations that write or read KV caches, with tensors of arbitrary contents."""

from __future__ import annotations

from typing import Any

import torch
from support.attention_calls import BF16
from support.recording import Recorded, Recording

from flashlatte import kv_cache
from flashlatte.ops.cache_gather.reference import CacheGatherParams
from flashlatte.ops.cache_write.reference import CacheWriteParams
from flashlatte.ops.compress.reference import CompressParams
from flashlatte.ops.gather_records.reference import GatherRecordsParams
from flashlatte.ops.reshape_and_cache.reference import ReshapeAndCacheParams
from flashlatte.ops.rope_cache_write.reference import RopeCacheWriteParams
from flashlatte.ops.rotate_and_cache.reference import RotateAndCacheParams


def cache_write(
    record: Recording,
    backend: str,
    form: str = "v32",
    tokens: int = 100,
    pages: int = 8,
    page_size: int = 64,
    gap: int = 0,
    scale_rounding: str = "power_of_two",
    dtype: torch.dtype = BF16,
    of_requests: bool = False,
    requests: int = 4,
    arch: int | None = 90,
) -> list[Recorded]:
    layout = kv_cache.get_format(form)
    rows = torch.zeros(tokens, layout.head_dim + gap, dtype=dtype)[:, : layout.head_dim]
    cache = kv_cache.allocate(form, pages, page_size)
    slots = torch.zeros(tokens, dtype=torch.int64)
    ids, indices, indptr = (torch.zeros(count, dtype=torch.int32) for count in (tokens, 2 * requests, requests + 1))
    lists = (ids, indices, indptr) if of_requests else ()
    of_format = layout.name, layout.head_dim, None, 1.0, scale_rounding
    params = CacheWriteParams(cache, slots, rows, None, *of_format, *lists)
    return record("cache_write", backend, params, arch=arch)


def cache_gather(
    record: Recording,
    backend: str,
    form: str = "v32",
    tokens: int = 100,
    requests: int = 4,
    pages: int = 8,
    page_size: int = 64,
    gap: int = 0,
    arch: int | None = 90,
) -> list[Recorded]:
    layout = kv_cache.get_format(form)
    cache = kv_cache.allocate(form, pages, page_size)
    table = torch.zeros(requests, 8, dtype=torch.int32)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    out = torch.zeros(tokens, layout.head_dim + gap, dtype=BF16)[:, : layout.head_dim]
    of_format = layout.name, layout.head_dim, None, 1.0
    params = CacheGatherParams(cache, table, starts, None, None, *of_format, out)
    return record("cache_gather", backend, params, arch=arch)


def cache_copy(
    record: Recording,
    backend: str,
    form: str = "v32",
    pairs: int = 3,
    pages: int = 8,
    page_size: int = 64,
    disjoint: bool = True,
    arch: int | None = 90,
) -> list[Recorded]:
    cache = kv_cache.allocate(form, pages, page_size)
    lists = [torch.zeros(pairs, dtype=torch.int64) for _ in range(2)]
    return record("cache_copy", backend, None, cache, *lists, disjoint, arch=arch)


def reshape_and_cache(
    record: Recording,
    backend: str,
    tokens: int = 100,
    heads: int = 8,
    widths: tuple[int, int] = (128, 128),
    pages: int = 8,
    page_size: int = 64,
    gap: int = 0,
    cache_dtype: torch.dtype = BF16,
    in_pieces: bool = False,
    per_token: bool = False,
    arch: int | None = 90,
) -> list[Recorded]:
    def side(width: int) -> tuple[Any, ...]:
        rows = torch.zeros(tokens, heads, width + gap, dtype=BF16)[..., :width]
        shape = (pages, page_size, heads, width // 16, 16) if in_pieces else (pages, page_size, heads, 1, width)
        scales = torch.zeros(pages, page_size, heads) if per_token else None
        return rows, torch.zeros(shape, dtype=cache_dtype), scales

    (key, k_cache, k_scale), (value, v_cache, v_scale) = map(side, widths)
    if in_pieces:
        k_cache = k_cache.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
    slots = torch.zeros(tokens, dtype=torch.int64)
    params = ReshapeAndCacheParams(key, value, k_cache, v_cache, slots, k_scale, 1.0, v_scale, 1.0)
    return record("reshape_and_cache", backend, params, arch=arch)


def gather_records(
    record: Recording,
    backend: str,
    form: str = "v32",
    tokens: int = 100,
    requests: int = 4,
    pages: int = 8,
    page_size: int = 64,
    arch: int | None = 90,
) -> list[Recorded]:
    cache = kv_cache.allocate(form, pages, page_size)
    out = torch.zeros(tokens, cache.shape[-1], dtype=cache.dtype)
    table, starts = torch.zeros(requests, 8, dtype=torch.int32), torch.zeros(requests + 1, dtype=torch.int32)
    layout = kv_cache.get_format(form)
    params = GatherRecordsParams(cache, table, starts, None, layout.name, layout.head_dim, out)
    return record("gather_records", backend, params, arch=arch)


def rope_cache_write(
    record: Recording,
    backend: str,
    form: str = "fp8",
    tokens: int = 100,
    heads: int = 16,
    pages: int = 4,
    page_size: int = 64,
    arch: int | None = 90,
) -> list[Recorded]:
    cache, where = kv_cache.allocate(form, pages, page_size), torch.zeros(tokens, dtype=torch.int64)
    latent, k_rope = torch.zeros(tokens, 512, dtype=BF16), torch.zeros(tokens, 64, dtype=BF16)
    q_rope, table = torch.zeros(tokens, heads, 192, dtype=BF16)[..., 128:], torch.zeros(100, 64, dtype=BF16)
    layout = kv_cache.get_format(form)
    params = RopeCacheWriteParams(
        cache, where, latent, k_rope, q_rope, where, table, True, layout.name, layout.head_dim, None, 1.0
    )
    return record("rope_cache_write", backend, params, arch=arch)


def compress(
    record: Recording,
    backend: str,
    form: str = "model1",
    ratio: int = 4,
    tokens: int = 100,
    requests: int = 4,
    pages: int = 8,
    page_size: int = 64,
    columns: int = 4,
    dtype: torch.dtype = torch.float32,
    with_state: bool = True,
    arch: int | None = 90,
) -> list[Recorded]:
    head_dim = 128 if form.startswith("index") else 512
    width = head_dim * (2 if ratio == 4 else 1)
    layout = kv_cache.get_format(form, head_dim)
    params = CompressParams(
        kv=torch.zeros(tokens, 2 * width, dtype=dtype)[:, :width],
        score=torch.zeros(tokens, 2 * width, dtype=dtype)[:, width:],
        ape=torch.zeros(ratio, width),
        weight=torch.zeros(head_dim),
        eps=1e-6,
        cos_sin=torch.zeros(100, 64),
        request_ids=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int64),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        cache=kv_cache.allocate(layout, pages, page_size),
        cache_format=layout.name,
        scale_rounding="power_of_two",
        state_cache=torch.zeros(9, page_size, 2 * width) if with_state else None,
        state_table=torch.zeros(requests, columns, dtype=torch.int32) if with_state else None,
    )
    return record("compress", backend, params, arch=arch)


def rotate_and_cache(
    record: Recording,
    backend: str,
    form: str = "model1",
    tokens: int = 100,
    heads: int = 64,
    pages: int = 8,
    page_size: int = 64,
    dtype: torch.dtype = BF16,
    arch: int | None = 90,
) -> list[Recorded]:
    layout = kv_cache.get_format(form, 512)
    q, cache = torch.zeros(tokens, heads, 512, dtype=dtype), kv_cache.allocate(layout, pages, page_size)
    where = torch.zeros(tokens, dtype=torch.int64)
    table = torch.zeros(100, 64)
    params = RotateAndCacheParams(
        None, q[:, 0], table, where, where, 1e-6, layout.name, "power_of_two", out=q, cache=cache
    )
    return record("rotate_and_cache", backend, params, arch=arch)
