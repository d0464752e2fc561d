"""From arguments to launches: all that a call settles on the host, from shapes and strides alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlatte.ops.index_logits.hopper import paged_kernel, ragged_kernel
from flashlatte.ops.index_logits.hopper.clean import BLOCK as CLEAN_BLOCK
from flashlatte.ops.index_logits.hopper.clean import clean_paged_kernel, clean_ragged_kernel
from flashlatte.ops.index_logits.hopper.tiles import KEYS, MOST_COLUMNS, numbers_layout, vectors_layout
from flashlatte.runtime.machine import num_sms
from flashlatte.runtime.triton_kernel import launching_on
from flashlatte.runtime.triton_launch import Address

# Work items that a program of the ragged kernel gets, if they keep the fewest keys: so that all end at about one time.
_ITEMS_A_PROGRAM = 16
_LEAST_ITEM_KEYS = 1024


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    logits: torch.Tensor,
    clean: bool,
    compressed: bool,
    schedule: int = 0,
    item_keys: int | None = None,
) -> None:
    num_queries, heads, head_dim = q.shape
    num_keys = k.shape[0]
    device = q.device
    programs = num_sms(device)
    queries = 2 * MOST_COLUMNS.value // heads
    if item_keys is None:
        item_keys = keys_of_item(num_queries, num_keys, queries, programs)
    items = -(-num_queries // queries) * -(-num_keys // item_keys)
    with launching_on(device):
        ragged_kernel.kernel[(min(items, programs),)](
            _rows_of("q", q.view(-1, head_dim), MOST_COLUMNS.value),
            _numbers_of("weights", weights.view(-1), MOST_COLUMNS.value),
            _rows_of("k", k, KEYS.value),
            _numbers_of("k_scale", k_scale, KEYS.value),
            key_start,
            key_end,
            num_queries,
            num_keys,
            item_keys,
            items,
            logits,
            logits.stride(0),
            logits.shape[1],
            int(compressed),
            HEADS=heads,
            HEAD_DIM=head_dim,
            TURNS=schedule,
            num_warps=4,
            enable_fp_fusion=True,
        )
        if clean:
            width = logits.shape[1]
            clean_ragged_kernel[(num_queries, -(-width // CLEAN_BLOCK))](
                logits,
                logits.stride(0),
                width,
                key_start,
                key_end,
                num_keys,
                int(compressed),
                BLOCK=CLEAN_BLOCK,
                num_warps=4,
            )


@functools.lru_cache(maxsize=1024)
def keys_of_item(num_queries: int, num_keys: int, queries: int, programs: int) -> int:
    """Keys that a work item covers."""
    blocks = -(-num_queries // queries)
    wanted = -(-_ITEMS_A_PROGRAM * programs // blocks)
    keys = -(-num_keys // (wanted * KEYS.value)) * KEYS.value
    return max(keys, _LEAST_ITEM_KEYS)


def _rows_of(name: str, x: torch.Tensor, rows: int) -> Any:
    """TMA descriptor of e4m3 vectors [n, D], of boxes of ``rows``."""
    strides = (x.stride(0) if x.shape[0] > 1 else x.shape[1], 1)
    return _descriptor(name, x.data_ptr(), torch.float8_e4m3fn, tuple(x.shape), strides, (rows, x.shape[1]))


def _numbers_of(name: str, x: torch.Tensor, count: int) -> Any:
    """TMA descriptor of float32 numbers [n], of boxes of ``count``."""
    return _descriptor(name, x.data_ptr(), torch.float32, tuple(x.shape), (1,), (count,))


@functools.lru_cache(maxsize=1024)
def _descriptor(
    name: str, address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: Sequence[int]
) -> Any:
    if address % 16 or any(stride * dtype.itemsize % 16 for stride in strides[:-1]):
        raise ValueError(
            f"{name} must have rows that begin at multiples of 16 bytes for backend='hopper', "
            f"got address {address:#x}, strides {strides}"
        )
    layout = vectors_layout(box[-1], len(box)) if dtype == torch.float8_e4m3fn else numbers_layout(len(box))
    return TensorDescriptor(Address(address, dtype), list(shape), list(strides), list(box), layout)


def paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    logits: torch.Tensor,
    clean: bool,
) -> None:
    requests, next_n, heads, head_dim = q.shape
    pages, page_size = cache.shape[:2]
    device = q.device
    columns = columns_of_tile(next_n, heads)
    box = math.gcd(page_size, KEYS.value)
    per_query = cache_seqlens.ndim == 2
    with launching_on(device):
        paged_kernel.kernel[(num_sms(device),)](
            _rows_of("q", q.view(-1, head_dim), columns),
            _numbers_of("weights", weights.view(-1), columns),
            _pages_of(cache, torch.float8_e4m3fn, (pages, page_size, head_dim), head_dim, box),
            _pages_of(cache, torch.float32, (pages, page_size * (head_dim + 4) // 4), None, box),
            page_size,
            block_table,
            block_table.stride(0),
            block_table.shape[1],
            cache_seqlens,
            next_n if per_query else 1,
            0 if per_query else 1,
            min(logits.shape[1], block_table.shape[1] * page_size),
            requests,
            next_n,
            logits,
            logits.stride(0),
            HEADS=heads,
            HEAD_DIM=head_dim,
            COLUMNS=columns,
            BOX=box,
            num_warps=4,
            enable_fp_fusion=True,
        )
        if clean:
            width = logits.shape[1]
            clean_paged_kernel[(requests * next_n, -(-width // CLEAN_BLOCK))](
                logits,
                logits.stride(0),
                width,
                cache_seqlens,
                next_n if per_query else 1,
                0 if per_query else 1,
                min(width, block_table.shape[1] * page_size),
                next_n,
                BLOCK=CLEAN_BLOCK,
                num_warps=4,
            )


def columns_of_tile(next_n: int, heads: int) -> int:
    """Heads of the queries that a tile takes: of a power of two of queries."""
    return min(heads << (next_n - 1).bit_length(), MOST_COLUMNS.value)


def _pages_of(cache: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], head_dim: int | None, box: int) -> Any:
    page_stride = cache.stride(0) // dtype.itemsize
    strides = (page_stride, 1) if head_dim is None else (page_stride, head_dim, 1)
    boxes = (1, box) if head_dim is None else (1, box, head_dim)
    return _descriptor("cache", cache.data_ptr(), dtype, shape, strides, boxes)
