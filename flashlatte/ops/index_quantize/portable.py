"""``index_quantize`` and ``index_gather`` in Triton."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import (
    RequestPages,
    Requests,
    Slots,
    locate_rows,
    locate_slots,
    pages_of,
    requests_of,
    slots_of,
    store_words,
)
from flashlatte.kernels.triton.cache_layout import Blocking, as_bytes, cdiv
from flashlatte.kernels.triton.fp4 import to_mxfp4
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, from_float32, to_float32
from flashlatte.kernels.triton.row_scales import scale_rows
from flashlatte.kernels.triton.rows import CacheRows, TokenRows, cache_rows, page_pointers, token_row, token_rows
from flashlatte.kv_cache.index_formats import as_index_cache
from flashlatte.ops.index_quantize.reference import IndexGatherParams, IndexQuantizeParams
from flashlatte.runtime.triton_kernel import kernel

QUANTIZE_BLOCKING = Blocking(tokens=16, warps=4)
GATHER_BLOCKING = Blocking(tokens=32, warps=4)


def index_quantize(params: IndexQuantizeParams) -> None:
    k = params.k
    cache, layout = as_index_cache(params.cache, k.shape[-1])
    cache = as_bytes(cache)
    slots = slots_of(params.slot_mapping, cache)
    index_quantize_kernel[(cdiv(slots.num_tokens, QUANTIZE_BLOCKING.tokens),)](
        slots,
        token_rows(k),
        cache_rows(cache, strided=False),
        D=layout.head_dim,
        ENCODING=layout.encoding,
        POWER_OF_TWO=params.scale_rounding == "power_of_two",
        WIDE=slots.num_slots >= 2**31,
        NATIVE=converts_e4m3(cache.device),
        BLOCK_T=QUANTIZE_BLOCKING.tokens,
        num_warps=QUANTIZE_BLOCKING.warps,
    )


def index_gather(params: IndexGatherParams) -> None:
    cache, layout = as_index_cache(params.cache, params.head_dim)
    num_pages, page_size = cache.shape[:2]
    block_table, scales, rows = params.block_table, params.scales, params.stored.shape[0]
    index_gather_kernel[(cdiv(rows, GATHER_BLOCKING.tokens),)](
        cache_rows(cache.view(torch.uint8), strided=False),
        requests_of(params.cu_seqlens, block_table.shape[0], params.seq_starts),
        pages_of(block_table, num_pages, page_size),
        stored=params.stored.view(torch.uint8),
        # With an axis of stride 1: a single scale may have any stride.
        scales=None if scales is None else scales.unsqueeze(-1).view(torch.uint8),
        num_rows=rows,
        VALUE_BYTES=layout.value_bytes,
        SCALE_BYTES=layout.scale_bytes,
        WIDE=block_table.shape[1] * page_size >= 2**31,
        BLOCK_T=GATHER_BLOCKING.tokens,
        num_warps=GATHER_BLOCKING.warps,
    )


@kernel
def index_quantize_kernel(
    slots: Slots,
    k: TokenRows,
    cache: CacheRows,
    D: tl.constexpr,
    ENCODING: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program quantizes BLOCK_T tokens. Elements of the cache are bytes, bf16 or float32."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid, page, offset = locate_slots(slots, tokens, WIDE)
    page_start = page_pointers(cache, page)
    k_row = token_row(k, tokens)
    column = tl.arange(0, D)[None, :]
    # [BLOCK_T, D]
    x = to_float32(tl.load(k_row[:, None] + column, mask=valid[:, None], other=0.0))
    if ENCODING == "e2m1":
        packed, exponents = to_mxfp4(x, BLOCK_T, D)
        row = page_start + offset * (D // 2)
        tl.store(row[:, None] + tl.arange(0, D // 2)[None, :], packed, mask=valid[:, None])
        scale_row = page_start + slots.page_size * (D // 2) + offset * (D // 32)
        tl.store(scale_row[:, None] + tl.arange(0, D // 32)[None, :], exponents, mask=valid[:, None])
    else:
        row = page_start + offset * D
        if ENCODING == "bf16":
            tl.store(row[:, None] + column, from_float32(x, tl.bfloat16), mask=valid[:, None])
        elif ENCODING == "fp32":
            tl.store(row[:, None] + column, x, mask=valid[:, None])
        else:
            values, scales = scale_rows(x, 1e-4, POWER_OF_TWO)
            tl.store(row[:, None] + column, float_to_e4m3(values, NATIVE), mask=valid[:, None])
            scale_row = page_start + slots.page_size * D + offset * 4
            store_words(scale_row, 0, scales.to(tl.int32, bitcast=True), valid, cache.align)


@kernel
def index_gather_kernel(
    cache: CacheRows,
    requests: Requests,
    pages: RequestPages,
    stored,
    scales,
    num_rows: tl.int64,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program copies the bytes of BLOCK_T rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    page_start = page_pointers(cache, page)
    column = tl.arange(0, VALUE_BYTES)[None, :]
    # [BLOCK_T, VALUE_BYTES]
    source = (page_start + offset * VALUE_BYTES)[:, None] + column
    value = tl.load(source, mask=found[:, None], other=0)
    tl.store(stored + rows[:, None] * VALUE_BYTES + column, value, mask=inside[:, None])
    if SCALE_BYTES > 0:
        byte = tl.arange(0, SCALE_BYTES)[None, :]
        source = (page_start + pages.page_size * VALUE_BYTES + offset * SCALE_BYTES)[:, None] + byte
        scale = tl.load(source, mask=found[:, None], other=0)
        tl.store(scales + rows[:, None] * SCALE_BYTES + byte, scale, mask=inside[:, None])
