"""``index_quantize`` and ``index_gather`` in Triton."""

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
    store_words,
)
from flashlatte.kernels.triton.cache_layout import Blocking, alignment_bytes, alignment_elements, as_bytes, cdiv
from flashlatte.kernels.triton.fp4 import to_mxfp4
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, from_float32, to_float32
from flashlatte.kernels.triton.row_scales import scale_rows
from flashlatte.kv_cache.index_formats import as_index_cache
from flashlatte.runtime import machine
from flashlatte.runtime.arguments import by_name
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

QUANTIZE_BLOCKING = Blocking(tokens=16, warps=4)
GATHER_BLOCKING = Blocking(tokens=32, warps=4)


def index_quantize(cache: torch.Tensor, slot_mapping: torch.Tensor, k: torch.Tensor, scale_rounding: str) -> None:
    cache, layout = as_index_cache(cache, k.shape[-1])
    cache = as_bytes(cache)
    page_stride = stride_in_use(cache, 0)
    unit = alignment_elements(cache, page_stride)
    k_unit = alignment_elements(k, stride_in_use(k, 0))
    tokens, num_slots = slot_mapping.shape[0], cache.shape[0] * cache.shape[1]
    index_quantize_kernel[(cdiv(tokens, QUANTIZE_BLOCKING.tokens),)](
        cache=cache,
        slot_mapping=slot_mapping,
        k=k,
        num_tokens=tokens,
        num_slots=num_slots,
        page_size=cache.shape[1],
        slot_stride=slot_mapping.stride(0),
        page_stride=page_stride // unit,
        k_stride=stride_in_use(k, 0) // k_unit,
        D=layout.head_dim,
        ENCODING=layout.encoding,
        POWER_OF_TWO=scale_rounding == "power_of_two",
        ALIGN=unit,
        K_ALIGN=k_unit,
        WIDE=num_slots >= 2**31,
        NATIVE=converts_e4m3(cache.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_T=QUANTIZE_BLOCKING.tokens,
        num_warps=QUANTIZE_BLOCKING.warps,
    )


def index_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    head_dim: int,
) -> None:
    cache, layout = as_index_cache(cache, head_dim)
    num_pages, page_size = cache.shape[:2]
    cache = cache.view(torch.uint8)
    page_stride = stride_in_use(cache, 0)
    unit = alignment_bytes(cache, page_stride)
    rows = values.shape[0]
    index_gather_kernel[(cdiv(rows, GATHER_BLOCKING.tokens),)](
        *by_name(
            index_gather_kernel,
            requests_of(cu_seqlens, block_table.shape[0], seq_starts),
            pages_of(block_table, num_pages, page_size),
            cache=cache,
            values=values.view(torch.uint8),
            scales=None if scales is None else scales.view(torch.uint8),
            num_rows=rows,
            page_stride=page_stride // unit,
        ),
        VALUE_BYTES=layout.value_bytes,
        SCALE_BYTES=layout.scale_bytes,
        ALIGN=unit,
        WIDE=block_table.shape[1] * page_size >= 2**31,
        BLOCK_T=GATHER_BLOCKING.tokens,
        num_warps=GATHER_BLOCKING.warps,
    )


@kernel(by_element=("slot_mapping",))
def index_quantize_kernel(
    cache,
    slot_mapping,
    k,
    num_tokens: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    slot_stride: tl.int64,
    page_stride: tl.int64,
    k_stride: tl.int64,
    D: tl.constexpr,
    ENCODING: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGN: tl.constexpr,
    K_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """``page_stride`` is in elements of the cache: bytes, bf16 or float32."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = Slots(slot_mapping, slot_stride, num_tokens, num_slots, page_size)
    valid, page, offset = locate_slots(slots, tokens, WIDE)
    page_start = cache + page * page_stride * ALIGN
    k_row = k + tokens * k_stride * K_ALIGN
    column = tl.arange(0, D)[None, :]
    # [BLOCK_T, D]
    x = to_float32(tl.load(k_row[:, None] + column, mask=valid[:, None], other=0.0), INTERPRETED)
    if ENCODING == "e2m1":
        packed, exponents = to_mxfp4(x, BLOCK_T, D)
        row = page_start + offset * (D // 2)
        tl.store(row[:, None] + tl.arange(0, D // 2)[None, :], packed, mask=valid[:, None])
        scale_row = page_start + page_size * (D // 2) + offset * (D // 32)
        tl.store(scale_row[:, None] + tl.arange(0, D // 32)[None, :], exponents, mask=valid[:, None])
    else:
        row = page_start + offset * D
        if ENCODING == "bf16":
            tl.store(row[:, None] + column, from_float32(x, tl.bfloat16, INTERPRETED), mask=valid[:, None])
        elif ENCODING == "fp32":
            tl.store(row[:, None] + column, x, mask=valid[:, None])
        else:
            values, scales = scale_rows(x, 1e-4, POWER_OF_TWO)
            tl.store(row[:, None] + column, float_to_e4m3(values, NATIVE), mask=valid[:, None])
            scale_row = page_start + page_size * D + offset * 4
            store_words(scale_row, 0, scales.to(tl.int32, bitcast=True), valid, ALIGN)


@kernel(by_element=("cu_seqlens", "seq_starts"))
def index_gather_kernel(
    cache,
    values,
    scales,
    cu_seqlens,
    cu_stride: tl.int64,
    num_boundaries: tl.int64,
    num_requests: tl.int64,
    seq_starts,
    start_stride: tl.int64,
    block_table,
    table_stride: tl.int64,
    max_pages: tl.int64,
    num_pages: tl.int64,
    page_size: tl.int64,
    num_rows: tl.int64,
    page_stride: tl.int64,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    requests = Requests(cu_seqlens, cu_stride, num_boundaries, num_requests, seq_starts, start_stride)
    pages = RequestPages(block_table, table_stride, max_pages, num_pages, page_size)
    inside, found, page, offset = locate_rows(requests, pages, rows, num_rows, WIDE)
    page_start = cache + page * page_stride * ALIGN
    column = tl.arange(0, VALUE_BYTES)[None, :]
    # [BLOCK_T, VALUE_BYTES]
    source = (page_start + offset * VALUE_BYTES)[:, None] + column
    stored = tl.load(source, mask=found[:, None], other=0)
    tl.store(values + rows[:, None] * VALUE_BYTES + column, stored, mask=inside[:, None])
    if SCALE_BYTES > 0:
        byte = tl.arange(0, SCALE_BYTES)[None, :]
        source = (page_start + page_size * VALUE_BYTES + offset * SCALE_BYTES)[:, None] + byte
        stored = tl.load(source, mask=found[:, None], other=0)
        tl.store(scales + rows[:, None] * SCALE_BYTES + byte, stored, mask=inside[:, None])
