"""Calls of TurboQuant's implementations, with tensors of arbitrary contents."""

from __future__ import annotations

import math

import torch
from support.recording import Recorded, Recording

from flashlatte.kv_cache import turboquant
from flashlatte.ops.turboquant_decode.reference import TurboQuantDecodeParams
from flashlatte.ops.turboquant_gather.reference import TurboQuantGatherParams
from flashlatte.ops.turboquant_store.reference import TurboQuantStoreParams

BF16 = torch.bfloat16


def _turboquant_cache(
    form: str, head_dim: int, heads: int, pages: int, page_size: int, gap: int | None
) -> torch.Tensor:
    """A cache with a gap of this many bytes between heads, or with the default strides."""
    if gap is None:
        return turboquant.allocate(form, pages, page_size, heads, head_dim)
    width = turboquant.turboquant_format(form, head_dim).record_bytes
    return torch.zeros(pages, page_size, heads, width + gap, dtype=torch.uint8)[..., :width]


def turboquant_store(
    record: Recording,
    backend: str,
    form: str = "turboquant_4bit_nc",
    tokens: int = 100,
    heads: int = 8,
    head_dim: int = 128,
    pages: int = 8,
    page_size: int = 64,
    gap: int | None = None,
    dtype: torch.dtype = BF16,
    arch: int | None = 90,
) -> list[Recorded]:
    cache = _turboquant_cache(form, head_dim, heads, pages, page_size, gap)
    rows, slots = torch.zeros(tokens, heads, head_dim, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
    params = TurboQuantStoreParams(rows, rows.clone(), cache, slots, form)
    return record("turboquant_store", backend, params, arch=arch)


def turboquant_gather(
    record: Recording,
    backend: str,
    form: str = "turboquant_4bit_nc",
    tokens: int = 100,
    heads: int = 8,
    head_dim: int = 128,
    requests: int = 4,
    pages: int = 8,
    page_size: int = 64,
    gap: int | None = None,
    arch: int | None = 90,
) -> list[Recorded]:
    cache = _turboquant_cache(form, head_dim, heads, pages, page_size, gap)
    table, starts = torch.zeros(requests, 8, dtype=torch.int32), torch.zeros(requests + 1, dtype=torch.int32)
    rows = torch.zeros(tokens, heads, head_dim, dtype=BF16)
    params = TurboQuantGatherParams(cache, table, starts, None, form, rows, rows.clone())
    return record("turboquant_gather", backend, params, arch=arch)


def turboquant_decode(
    record: Recording,
    backend: str,
    form: str = "turboquant_4bit_nc",
    batch: int = 64,
    s_q: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    pages: int = 8,
    page_size: int = 64,
    columns: int = 128,
    gap: int | None = None,
    dtype: torch.dtype = BF16,
    causal: bool = False,
    arch: int | None = 90,
) -> list[Recorded]:
    q = torch.zeros(batch, s_q, heads, head_dim, dtype=dtype)
    cache = _turboquant_cache(form, head_dim, kv_heads, pages, page_size, gap)
    table, lengths = torch.zeros(batch, columns, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    params = TurboQuantDecodeParams(
        q=q,
        cache=cache,
        block_table=table,
        cache_seqlens=lengths,
        cache_format=form,
        softmax_scale=head_dim**-0.5,
        causal=causal,
        empty_lse=-math.inf,
        out=q.clone(),
        lse=torch.zeros(batch, heads, s_q),
    )
    return record("turboquant_decode", backend, params, arch=arch)
