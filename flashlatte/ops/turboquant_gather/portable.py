"""``turboquant_gather`` in Triton: tiles of rows, each the key or the value of a token's head.

A program processes several tiles, of either keys or values: both together would need twice the registers.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import RequestPages, Requests, locate_rows, pages_of, requests_of
from flashlatte.kernels.triton.cache_layout import alignment_bytes, alignment_elements, cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3, e4m3_to_float, from_float32
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.kernels.triton.turboquant import centroids_of, hadamard, load_codes, load_half
from flashlatte.kv_cache.lloyd_max import lloyd_max
from flashlatte.kv_cache.turboquant import TurboQuantFormat
from flashlatte.runtime import machine
from flashlatte.runtime.arguments import by_name
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

BLOCK_R = 64
NUM_WARPS = 8
# Programs per SM (each builds the matrix), and the resulting registers per thread.
PROGRAMS = 2
REGISTERS = 128


def turboquant_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    layout: TurboQuantFormat,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    num_pages, page_size, heads = cache.shape[:3]
    tokens, _, head_dim = key.shape
    block = BLOCK_R if not machine.interpreting() else 16
    cache_strides = [stride_in_use(cache, axis) for axis in range(3)]
    k_strides, v_strides = ([stride_in_use(rows, axis) for axis in (0, 1)] for rows in (key, value))
    cache_align = min(alignment_bytes(cache, *cache_strides), 4)
    k_align, v_align = (alignment_elements(rows, *strides) for rows, strides in ((key, k_strides), (value, v_strides)))
    programs = min(cdiv(tokens * heads, block), machine.num_sms(cache.device) * PROGRAMS)
    codebook = lloyd_max(layout.key_bits) if layout.rotates else ()
    turboquant_gather_kernel[(programs, 2)](
        *by_name(
            turboquant_gather_kernel,
            requests_of(cu_seqlens, block_table.shape[0], seq_starts),
            pages_of(block_table, num_pages, page_size),
            key=key,
            k_token_stride=k_strides[0] // k_align,
            k_head_stride=k_strides[1] // k_align,
            value=value,
            v_token_stride=v_strides[0] // v_align,
            v_head_stride=v_strides[1] // v_align,
            cache=cache,
            page_stride=cache_strides[0] // cache_align,
            slot_stride=cache_strides[1] // cache_align,
            cache_head_stride=cache_strides[2] // cache_align,
            num_tokens=tokens,
            heads=heads,
        ),
        D=head_dim,
        KEY_BITS=layout.key_bits,
        VALUE_BITS=layout.value_bits,
        CODEBOOK=codebook[len(codebook) // 2 :],
        NORM_OFFSET=layout.norm_offset,
        VALUE_OFFSET=layout.value_offset,
        SCALE_OFFSET=layout.scale_offset,
        K_ALIGN=k_align,
        V_ALIGN=v_align,
        CACHE_ALIGN=cache_align,
        WIDE=max(block_table.shape[1] * page_size, tokens * heads + programs * block) >= 2**31,
        NATIVE=converts_e4m3(cache.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_R=block,
        num_warps=NUM_WARPS,
        **({"maxnreg": REGISTERS} if gpu_class(cache.device) in NVIDIA else {}),
    )


@kernel(by_element=("cu_seqlens", "seq_starts"))
def turboquant_gather_kernel(
    key,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    value,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    cache,
    page_stride: tl.int64,
    slot_stride: tl.int64,
    cache_head_stride: tl.int64,
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
    num_tokens: tl.int64,
    heads: tl.int64,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    K_ALIGN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Strides are in units of their tensor's ALIGN. CODEBOOK: positive centroids for N(0, 1)."""
    operand: tl.constexpr = tl.float32 if INTERPRETED else tl.float16
    HALF_ALIGN: tl.constexpr = min(CACHE_ALIGN, 2)
    VALUE_ALIGN: tl.constexpr = CACHE_ALIGN if VALUE_OFFSET % 4 == 0 else HALF_ALIGN
    requests = Requests(cu_seqlens, cu_stride, num_boundaries, num_requests, seq_starts, start_stride)
    pages = RequestPages(block_table, table_stride, max_pages, num_pages, page_size)
    side = tl.program_id(1)
    col = tl.arange(0, D)[None, :]
    if KEY_BITS < 8:
        rotation = hadamard(D, operand)
    for start in range(tl.program_id(0), tl.cdiv(num_tokens * heads, BLOCK_R), tl.num_programs(0)):
        row = tl.arange(0, BLOCK_R).to(tl.int64) + start * BLOCK_R
        if not WIDE:
            row = row.to(tl.int32)
        token = (row // heads.to(row.dtype)).to(tl.int64)
        head = row.to(tl.int64) - token * heads
        inside, found, page, offset = locate_rows(requests, pages, token, num_tokens, WIDE)
        record = cache + (page * page_stride + offset * slot_stride + head * cache_head_stride) * CACHE_ALIGN

        if side == 0:
            if KEY_BITS == 8:
                k = e4m3_to_float(tl.load(record[:, None] + col, mask=found[:, None], other=0), NATIVE)
            else:
                # [BLOCK_R, D]
                rotated = centroids_of(load_codes(record, found, D, KEY_BITS, CACHE_ALIGN), CODEBOOK)
                length = tl.sqrt_rn(tl.sum(rotated * rotated, axis=1))
                norm = load_half(record + NORM_OFFSET, found, HALF_ALIGN)
                # Multiply by the matrix again: it is D times its own inverse.
                k = tl.dot(rotated.to(operand), rotation, input_precision="ieee")
                k *= (norm / length * (1.0 / D**0.5))[:, None]
            k_row = key + (token * k_token_stride + head * k_head_stride) * K_ALIGN
            tl.store(k_row[:, None] + col, from_float32(k, key.dtype.element_ty, INTERPRETED), mask=inside[:, None])
        else:
            steps = load_codes(record + VALUE_OFFSET, found, D, VALUE_BITS, VALUE_ALIGN).to(tl.float32)
            scale = load_half(record + SCALE_OFFSET, found, HALF_ALIGN)
            minimum = load_half(record + SCALE_OFFSET + 2, found, HALF_ALIGN)
            v = steps * scale[:, None] + minimum[:, None]
            v_row = value + (token * v_token_stride + head * v_head_stride) * V_ALIGN
            tl.store(v_row[:, None] + col, from_float32(v, value.dtype.element_ty, INTERPRETED), mask=inside[:, None])
