"""``turboquant_store`` in Triton: tiles of rows, each the key or the value of a token's head.

A tile of keys is rotated by one product with the Hadamard matrix, whose entries are 1 and -1: every summand is exact.
The matrix is made once by a program, which then takes several tiles of one side: keys and values together would take
the registers of two programs.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots, store_words
from flashlatte.kernels.triton.cache_layout import blocks, unit_bytes, unit_elements
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, to_float32
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.kernels.triton.turboquant import hadamard
from flashlatte.kv_cache.lloyd_max import midpoints
from flashlatte.kv_cache.turboquant import LARGEST_HALF, NORM_EPSILON, SMALLEST_VALUE_SCALE, TurboQuantFormat
from flashlatte.runtime import machine
from flashlatte.runtime.arguments import by_name
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

BLOCK_R = 64
NUM_WARPS = 8
# Programs of an SM at once, of which each makes the matrix, and the registers that leaves to a thread.
PROGRAMS = 2
REGISTERS = 128


def turboquant_store(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: TurboQuantFormat
) -> None:
    num_pages, page_size, heads = cache.shape[:3]
    head_dim = key.shape[2]
    num_rows, num_slots = slot_mapping.shape[0] * heads, num_pages * page_size
    block = BLOCK_R if not machine.interpreting() else 16
    k_strides, v_strides = ([stride_in_use(rows, axis) for axis in (0, 1)] for rows in (key, value))
    cache_strides = [stride_in_use(cache, axis) for axis in range(3)]
    k_align, v_align = (unit_elements(rows, *strides) for rows, strides in ((key, k_strides), (value, v_strides)))
    # Records are of an even number of bytes: whole halves lie at even addresses, if heads begin at such.
    cache_align = min(unit_bytes(cache, *cache_strides), 4)
    programs = min(blocks(num_rows, block), machine.num_sms(key.device) * PROGRAMS)
    turboquant_store_kernel[(programs, 2)](
        *by_name(
            turboquant_store_kernel,
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
            slot_mapping=slot_mapping,
            mapping_stride=slot_mapping.stride(0),
            num_tokens=slot_mapping.shape[0],
            num_slots=num_slots,
            page_size=page_size,
            heads=heads,
        ),
        D=head_dim,
        KEY_BITS=layout.key_bits,
        VALUE_BITS=layout.value_bits,
        MIDPOINTS=tuple(middle for middle in midpoints(layout.key_bits) if middle > 0) if layout.rotates else (),
        NORM_OFFSET=layout.norm_offset,
        VALUE_OFFSET=layout.value_offset,
        SCALE_OFFSET=layout.scale_offset,
        NORM_EPSILON=NORM_EPSILON,
        SMALLEST_VALUE_SCALE=SMALLEST_VALUE_SCALE,
        LARGEST_HALF=LARGEST_HALF,
        K_ALIGN=k_align,
        V_ALIGN=v_align,
        CACHE_ALIGN=cache_align,
        WIDE=max(num_slots, num_rows + programs * block) >= 2**31,
        NATIVE=converts_e4m3(key.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_R=block,
        num_warps=NUM_WARPS,
        **({"maxnreg": REGISTERS} if gpu_class(key.device) in NVIDIA else {}),
    )


@triton.jit
def _store_codes(record, codes, valid, D: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr):
    """Pack codes [BLOCK_R, D] at byte addresses ``record`` [BLOCK_R]."""
    shifts = (tl.arange(0, 8) * BITS)[None, None, :]
    # [BLOCK_R, D / 8], of 8 codes each
    words = tl.sum(tl.reshape(codes, [codes.shape[0], D // 8, 8]) << shifts, axis=2)
    group = tl.arange(0, D // 8)[None, :]
    if BITS == 4 and ALIGN >= 4:
        store_words(record[:, None], group, words, valid[:, None], ALIGN)
    elif BITS == 4:
        for half in tl.static_range(2):
            stored = (words >> (16 * half)).to(tl.int16)
            store_words(record[:, None], group * 2 + half, stored, valid[:, None], ALIGN)
    else:
        for byte in tl.static_range(BITS):
            stored = (words >> (8 * byte)).to(tl.uint8)
            tl.store(record[:, None] + group * BITS + byte, stored, mask=valid[:, None])


@triton.jit
def _store_half(address, x, is_finite, valid, LARGEST_HALF: tl.constexpr, ALIGN: tl.constexpr):
    """fp16 of float32 x [BLOCK_R], saturating; NaN where the row is not finite."""
    x = tl.minimum(tl.maximum(x, -LARGEST_HALF), LARGEST_HALF)
    half = tl.where(is_finite, x, float("nan")).to(tl.float16).to(tl.int16, bitcast=True)
    store_words(address, 0, half, valid, ALIGN)


@triton.jit
def _codes_of(x, MIDPOINTS: tl.constexpr):
    """int32 codes of normal numbers, by bisection. MIDPOINTS are the 3 or 7 above 0, rising."""
    HALF: tl.constexpr = len(MIDPOINTS) + 1
    size = tl.abs(x)
    upper = size >= MIDPOINTS[HALF // 2 - 1]
    code = tl.where(upper, HALF + HALF // 2, HALF)
    if HALF == 4:
        last = size >= tl.where(upper, MIDPOINTS[2], MIDPOINTS[0])
    else:
        second = size >= tl.where(upper, MIDPOINTS[5], MIDPOINTS[1])
        code += tl.where(second, 2, 0)
        above, below = tl.where(second, MIDPOINTS[6], MIDPOINTS[4]), tl.where(second, MIDPOINTS[2], MIDPOINTS[0])
        last = size >= tl.where(upper, above, below)
    code += tl.where(last, 1, 0)
    # The code of -x has all bits turned over.
    return code ^ tl.where(x >= 0, 0, 2 * HALF - 1)


@triton.jit
def _quotient(x, scale, INTERPRETED: tl.constexpr):
    """x / scale of float32 x [BLOCK_R, D] and scale [BLOCK_R, 1], rounded as a division is.

    By the scale's reciprocal, and what that leaves of x once more: two fused products for the eight instructions and
    a branch of a division. Triton's interpreter does not fuse them. (Markstein, 1990; where all bits of a scale are 1
    the last bit may differ, which moves no number over a half step.)
    """
    if INTERPRETED:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        reciprocal = tl.div_rn(1.0, scale)
        quotient = x * reciprocal
        return tl.fma(tl.fma(-quotient, scale, x), reciprocal, quotient)


@triton.jit
def _is_finite(rows):
    """Whether all numbers of each row are: x · 0 is 0, or NaN."""
    return tl.sum(rows * 0.0, axis=1) == 0


@kernel(by_element=("slot_mapping",))
def turboquant_store_kernel(
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
    slot_mapping,
    mapping_stride: tl.int64,
    num_tokens: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    heads: tl.int64,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    MIDPOINTS: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    NORM_EPSILON: tl.constexpr,
    SMALLEST_VALUE_SCALE: tl.constexpr,
    LARGEST_HALF: tl.constexpr,
    K_ALIGN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Strides count the ALIGN of what they belong to. MIDPOINTS: those above 0, for N(0, 1)."""
    CODE_ALIGN: tl.constexpr = min(CACHE_ALIGN, 2)
    number: tl.constexpr = tl.float32 if INTERPRETED else key.dtype.element_ty
    slots = Slots(slot_mapping, mapping_stride, num_tokens, num_slots, page_size)
    side = tl.program_id(1)
    col = tl.arange(0, D)[None, :]
    if KEY_BITS < 8:
        rotation = hadamard(D, number)
    for start in range(tl.program_id(0), tl.cdiv(num_tokens * heads, BLOCK_R), tl.num_programs(0)):
        row = tl.arange(0, BLOCK_R).to(tl.int64) + start * BLOCK_R
        if not WIDE:
            row = row.to(tl.int32)
        token = (row // heads.to(row.dtype)).to(tl.int64)
        head = row.to(tl.int64) - token * heads
        valid, page, offset = locate_slots(slots, token, WIDE)
        record = cache + (page * page_stride + offset * slot_stride + head * cache_head_stride) * CACHE_ALIGN

        if side == 0:
            k_row = key + (token * k_token_stride + head * k_head_stride) * K_ALIGN
            k = tl.load(k_row[:, None] + col, mask=valid[:, None], other=0.0)  # [BLOCK_R, D]
            k32 = to_float32(k, INTERPRETED)
            if KEY_BITS == 8:
                tl.store(record[:, None] + col, float_to_e4m3(k32, NATIVE), mask=valid[:, None])
            else:
                norm = tl.sqrt_rn(tl.sum(k32 * k32, axis=1))
                # Rotated by a matrix of 1 and -1 the direction of a key has variance 1 in each place.
                rotated = tl.dot(k32 if INTERPRETED else k, rotation, input_precision="ieee")
                rotated *= tl.div_rn(1.0, norm + NORM_EPSILON)[:, None]
                _store_codes(record, _codes_of(rotated, MIDPOINTS), valid, D, KEY_BITS, CACHE_ALIGN)
                _store_half(record + NORM_OFFSET, norm, norm - norm == 0, valid, LARGEST_HALF, CODE_ALIGN)
        else:
            v_row = value + (token * v_token_stride + head * v_head_stride) * V_ALIGN
            v = to_float32(tl.load(v_row[:, None] + col, mask=valid[:, None], other=0.0), INTERPRETED)
            LARGEST: tl.constexpr = (1 << VALUE_BITS) - 1
            minimum = tl.min(v, axis=1)
            scale = tl.maximum(tl.div_rn(tl.max(v, axis=1) - minimum, LARGEST * 1.0), SMALLEST_VALUE_SCALE)
            steps = _quotient(v - minimum[:, None], scale[:, None], INTERPRETED)
            # A row that is not finite may give any number here.
            steps = (tl.minimum(tl.maximum(steps, 0.0), LARGEST * 1.0) + 0.5).to(tl.int32)
            V_ALIGNMENT: tl.constexpr = CACHE_ALIGN if VALUE_OFFSET % 4 == 0 else CODE_ALIGN
            _store_codes(record + VALUE_OFFSET, steps, valid, D, VALUE_BITS, V_ALIGNMENT)
            is_finite = _is_finite(v)
            _store_half(record + SCALE_OFFSET, scale, is_finite, valid, LARGEST_HALF, CODE_ALIGN)
            _store_half(record + SCALE_OFFSET + 2, minimum, is_finite, valid, LARGEST_HALF, CODE_ALIGN)
