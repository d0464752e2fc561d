"""``turboquant_gather`` in Triton: tiles of rows, each the key or the value of a token's head.

A program processes several tiles, of either keys or values: both together would need twice the registers.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import triton.language as tl

from flashlatte.kernels.triton.cache_address import RequestPages, Requests, locate_rows, pages_of, requests_of
from flashlatte.kernels.triton.cache_layout import cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3, e4m3_to_float, from_float32
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.kernels.triton.rows import HeadRows, head_row, head_rows
from flashlatte.kernels.triton.turboquant import RecordCache, centroids_of, hadamard, load_codes, load_half, records_of
from flashlatte.ops.turboquant_gather.reference import TurboQuantGatherParams
from flashlatte.runtime import machine
from flashlatte.runtime.triton_kernel import INTERPRETED, kernel

BLOCK_R = 64
NUM_WARPS = 8
# Programs per SM (each builds the matrix), and the resulting registers per thread.
PROGRAMS = 2
REGISTERS = 128


def turboquant_gather(params: TurboQuantGatherParams) -> None:
    cache, key, value, block_table = params.cache, params.key, params.value, params.block_table
    num_pages, page_size, heads = cache.shape[:3]
    tokens = key.shape[0]
    block = 16 if machine.interpreting() else BLOCK_R
    records, form = records_of(cache, params.layout, 4, native=converts_e4m3(cache.device))
    programs = min(cdiv(tokens * heads, block), machine.num_sms(cache.device) * PROGRAMS)
    turboquant_gather_kernel[(programs, 2)](
        requests_of(params.cu_seqlens, block_table.shape[0], params.seq_starts),
        pages_of(block_table, num_pages, page_size),
        records,
        head_rows(key),
        head_rows(value),
        num_tokens=tokens,
        heads=heads,
        FORM=form,
        WIDE=max(block_table.shape[1] * page_size, tokens * heads + programs * block) >= 2**31,
        BLOCK_R=block,
        num_warps=NUM_WARPS,
        **({"maxnreg": REGISTERS} if gpu_class(cache.device) in NVIDIA else {}),
    )


@kernel
def turboquant_gather_kernel(
    requests: Requests,
    pages: RequestPages,
    cache: RecordCache,
    key: HeadRows,
    value: HeadRows,
    num_tokens: tl.int64,
    heads: tl.int64,
    FORM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    D: tl.constexpr = FORM.head_dim
    KEY_BITS: tl.constexpr = FORM.key_bits
    VALUE_BITS: tl.constexpr = FORM.value_bits
    CODEBOOK: tl.constexpr = FORM.codebook
    CACHE_ALIGN: tl.constexpr = FORM.align
    operand: tl.constexpr = tl.float32 if INTERPRETED else tl.float16
    HALF_ALIGN: tl.constexpr = min(CACHE_ALIGN, 2)
    VALUE_ALIGN: tl.constexpr = CACHE_ALIGN if FORM.value_offset % 4 == 0 else HALF_ALIGN
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
        in_page = offset * cache.stride_token + head * cache.stride_head
        record = cache.start + (page * cache.stride_page + in_page) * CACHE_ALIGN

        if side == 0:
            if KEY_BITS == 8:
                k = e4m3_to_float(tl.load(record[:, None] + col, mask=found[:, None], other=0), FORM.native)
            else:
                # [BLOCK_R, D]
                rotated = centroids_of(load_codes(record, found, D, KEY_BITS, CACHE_ALIGN), CODEBOOK)
                length = tl.sqrt_rn(tl.sum(rotated * rotated, axis=1))
                norm = load_half(record + FORM.norm_offset, found, HALF_ALIGN)
                # Multiply by the matrix again: it is D times its own inverse.
                k = tl.dot(rotated.to(operand), rotation, input_precision="ieee")
                k *= (norm / length * (1.0 / D**0.5))[:, None]
            k_row = head_row(key, token, head)
            tl.store(k_row[:, None] + col, from_float32(k, key.start.dtype.element_ty), mask=inside[:, None])
        else:
            steps = load_codes(record + FORM.value_offset, found, D, VALUE_BITS, VALUE_ALIGN).to(tl.float32)
            scale = load_half(record + FORM.scale_offset, found, HALF_ALIGN)
            minimum = load_half(record + FORM.scale_offset + 2, found, HALF_ALIGN)
            v = steps * scale[:, None] + minimum[:, None]
            v_row = head_row(value, token, head)
            tl.store(v_row[:, None] + col, from_float32(v, value.start.dtype.element_ty), mask=inside[:, None])
