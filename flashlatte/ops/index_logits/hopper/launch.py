"""The launcher: everything a call computes on the host, from shapes and strides alone."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlatte.ops.index_logits.hopper.clean import BLOCK, clean_paged_kernel, clean_ragged_kernel, programs_of_row
from flashlatte.ops.index_logits.hopper.paged_kernel import (
    MIN_WEIGHTS,
    IndexCache,
    PagedLogitsQueries,
    index_logits_paged_kernel,
)
from flashlatte.ops.index_logits.hopper.ragged_kernel import (
    COLUMNS,
    RaggedLogitsInputs,
    RaggedLogitsWork,
    index_logits_ragged_kernel,
)
from flashlatte.ops.index_logits.hopper.scores import LogitsOutput
from flashlatte.ops.index_logits.hopper.tiles import KEYS, MAX_COLUMNS, scalars_layout, vectors_layout
from flashlatte.ops.index_logits.key_ranges import key_ranges, query_lengths
from flashlatte.ops.index_logits.reference import IndexLogitsParams, PagedIndexLogitsParams
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.tma_descriptors import Address, check_rows

# Work items per program of the ragged kernel, if they keep the minimum number of keys: many, to balance the programs.
_ITEMS_PER_PROGRAM = 16
_MIN_ITEM_KEYS = 1024
_SCALE_BYTES = 4


def ragged(params: IndexLogitsParams) -> None:
    """Logits of q e4m3 [M, H, D] with keys e4m3 [N, D]; H is a power of two from 8 to 128."""
    q, k, logits = params.q, params.k, params.logits
    num_queries, heads, head_dim = q.shape
    num_keys, width = k.shape[0], logits.shape[1]
    sms = machine.num_sms(q.device)
    queries = 2 * COLUMNS.value // heads
    item_keys = keys_per_item(num_queries, num_keys, queries, sms)
    items = -(-num_queries // queries) * -(-num_keys // item_keys)
    programs = min(items, sms)
    ranges = key_ranges(params)
    output = LogitsOutput(logits, stride_in_use(logits, 0), width, int(params.compressed))
    inputs = RaggedLogitsInputs(
        _vectors("q", q.reshape(-1, head_dim), COLUMNS.value),
        _scalars("weights", params.weights.reshape(-1), COLUMNS.value),
        _vectors("k", k, KEYS.value),
        _scalars("k_scale", params.k_scale, KEYS.value),
    )
    work = RaggedLogitsWork(ranges, num_queries, num_keys, item_keys, -(-items // programs))
    index_logits_ragged_kernel[(programs,)](inputs, work, output, HEADS=heads, HEAD_DIM=head_dim, num_warps=4)
    if params.clean:
        clean_ragged_kernel[(num_queries, programs_of_row(num_queries, width, sms))](
            output, ranges, num_keys=num_keys, BLOCK=BLOCK, num_warps=4
        )


def paged(params: PagedIndexLogitsParams) -> None:
    """Logits of q e4m3 [b, next_n, H, D] with paged keys; H is a power of two from 8 to 128, the page size a multiple
    of 32."""
    q, cache, block_table, logits = params.q, params.cache, params.block_table, params.logits
    requests, next_n, heads, head_dim = q.shape
    pages, page_size = cache.shape[:2]
    columns = columns_per_tile(next_n, heads)
    box = math.gcd(page_size, KEYS.value)
    lengths = query_lengths(params, columns // heads)
    output = LogitsOutput(logits, stride_in_use(logits, 0), logits.shape[1], 0)
    queries = PagedLogitsQueries(
        _vectors("q", q.reshape(-1, head_dim), columns),
        _scalars("weights", params.weights.reshape(-1), max(columns, MIN_WEIGHTS.value)),
    )
    index_cache = IndexCache(
        *_pages(cache, head_dim, box),
        pages,
        page_size,
        block_table,
        stride_in_use(block_table, 0),
        block_table.shape[1],
    )
    programs = machine.num_sms(q.device)
    index_logits_paged_kernel[(programs,)](
        queries,
        index_cache,
        lengths,
        output,
        HEADS=heads,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        BOX=box,
        ONE_BOX=box == page_size,
        num_warps=4,
        launch_pdl=True,
    )
    if params.clean:
        rows = requests * next_n
        clean_paged_kernel[(rows, programs_of_row(rows, output.width, programs))](
            output, lengths, BLOCK=BLOCK, num_warps=4
        )


@functools.lru_cache(maxsize=1024)
def keys_per_item(num_queries: int, num_keys: int, queries: int, programs: int) -> int:
    """Keys per work item of the ragged kernel."""
    blocks = -(-num_queries // queries)
    items = -(-_ITEMS_PER_PROGRAM * programs // blocks)
    keys = -(-num_keys // (items * KEYS.value)) * KEYS.value
    return max(keys, _MIN_ITEM_KEYS)


def columns_per_tile(next_n: int, heads: int) -> int:
    """Columns of a tile of the paged kernel: the heads of a power of two of queries, at most MAX_COLUMNS."""
    return min(heads << (next_n - 1).bit_length(), MAX_COLUMNS.value)


def _vectors(name: str, x: torch.Tensor, rows: int) -> Any:
    """TMA descriptor of e4m3 vectors [n, D], for boxes of ``rows``."""
    stride = stride_in_use(x, 0) or x.shape[1]
    return _descriptor(name, x.data_ptr(), x.dtype, tuple(x.shape), (stride, 1), (rows, x.shape[1]))


def _scalars(name: str, x: torch.Tensor, count: int) -> Any:
    """TMA descriptor of float32 scalars [n], for boxes of ``count``."""
    return _descriptor(name, x.data_ptr(), x.dtype, tuple(x.shape), (1,), (count,))


def _pages(cache: torch.Tensor, head_dim: int, box: int) -> tuple[Any, Any]:
    """TMA descriptors of a cache's vectors and of its scales, which follow the vectors in each page."""
    pages, page_size = cache.shape[:2]
    address = cache.data_ptr()
    page_bytes = page_size * (head_dim + _SCALE_BYTES)
    stride = (stride_in_use(cache, 0) or page_bytes) * cache.itemsize
    vectors = _descriptor(
        "cache",
        address,
        torch.float8_e4m3fn,
        (pages, page_size, head_dim),
        (stride, head_dim, 1),
        (1, box, head_dim),
    )
    scales_shape = (pages, page_bytes // _SCALE_BYTES)
    scales = _descriptor("cache", address, torch.float32, scales_shape, (stride // _SCALE_BYTES, 1), (1, box))
    return vectors, scales


@functools.lru_cache(maxsize=1024)
def _descriptor(
    name: str,
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> Any:
    check_rows(name, address, strides[:-1], dtype.itemsize)
    layout = vectors_layout(box[-1], len(box)) if dtype == torch.float8_e4m3fn else scalars_layout(len(box))
    return TensorDescriptor(Address(address, dtype), list(shape), list(strides), list(box), layout)
