"""``reshape_and_cache`` in Triton: a program writes rows (token, head) of keys and of values."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots, slots_of
from flashlatte.kernels.triton.cache_layout import alignment_elements, cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, float_to_e5m2, float_to_int8, to_float32
from flashlatte.kernels.triton.rows import HeadRows, head_row, head_rows
from flashlatte.kv_cache.one_byte import LARGEST, SMALLEST_SCALE
from flashlatte.ops.reshape_and_cache.reference import ReshapeAndCacheParams
from flashlatte.runtime.kernel_records import Constant, Float32, Int64, Pointer
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

ELEMENTS = 4096  # of a key tile
NUM_WARPS = 4


class KeyValueForm(NamedTuple):
    """The constants of keys or of values.

    Attributes:
        width, block: elements of a row, and columns of its tile.
        piece: adjacent elements of a cached row, the last axis of the cache.
        cache_align: divisor of the cache's strides, in elements.
        dtype: dtype of a one-byte cache, None for others; ``largest``: its largest value.
        writes_scale: the scale of each row is computed and written.
    """

    width: int
    block: int
    piece: int
    cache_align: int
    dtype: str | None
    largest: float
    writes_scale: bool


class KeyValueRows(NamedTuple):
    """Keys or values: new rows [T, h_kv, width], and the cache and scales that they are written to.

    Strides of the cache are in units of ``form.cache_align`` elements. A scale's strides are 0 if it applies to a whole
    head or to all; it is ``scale_value`` if ``scale`` is None.
    """

    rows: HeadRows
    cache: Pointer
    page_stride: Int64
    slot_stride: Int64
    head_stride: Int64
    piece_stride: Int64
    scale: Pointer
    scale_value: Float32
    scale_page_stride: Int64
    scale_slot_stride: Int64
    scale_head_stride: Int64
    form: Constant


def reshape_and_cache(params: ReshapeAndCacheParams) -> None:
    key, value = params.key, params.value
    heads = key.shape[1]
    slots = slots_of(params.slot_mapping, params.k_cache)
    num_rows = slots.num_tokens * heads
    rows = max(ELEMENTS // max(triton.next_power_of_2(key.shape[2]), triton.next_power_of_2(value.shape[2])), 1)
    reshape_and_cache_kernel[(cdiv(num_rows, rows),)](
        slots,
        _key_value_rows(key, params.k_cache, params.k_scale, params.k_scale_value),
        _key_value_rows(value, params.v_cache, params.v_scale, params.v_scale_value),
        heads=heads,
        SMALLEST_SCALE=SMALLEST_SCALE,
        WIDE=max(slots.num_slots, num_rows + rows) >= 2**31,
        NATIVE=converts_e4m3(key.device),
        BLOCK_R=rows,
        num_warps=NUM_WARPS,
    )


def _key_value_rows(
    rows: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None, scale_value: float
) -> KeyValueRows:
    cache_strides = [stride_in_use(cache, axis) for axis in range(4)]
    cache_align = alignment_elements(cache, *cache_strides)
    scale_strides = [0, 0, 0]
    if scale is not None and scale.numel() > 1:
        scale_strides = [0] * (3 - scale.dim()) + list(scale.stride())
    is_bytes = cache.dtype in LARGEST
    return KeyValueRows(
        head_rows(rows),
        cache.view(torch.uint8) if is_bytes else cache,
        *(stride // cache_align for stride in cache_strides),
        scale,
        scale_value,
        *scale_strides,
        KeyValueForm(
            width=rows.shape[2],
            block=triton.next_power_of_2(rows.shape[2]),
            piece=cache.shape[4],
            cache_align=cache_align,
            dtype=str(cache.dtype) if is_bytes else None,
            largest=LARGEST.get(cache.dtype, 0.0),
            writes_scale=scale is not None and scale.dim() == 3,
        ),
    )


@kernel
def reshape_and_cache_kernel(
    slots: Slots,
    keys: KeyValueRows,
    values: KeyValueRows,
    heads: tl.int64,
    SMALLEST_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write BLOCK_R rows (token, head) of keys and of values."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    if WIDE:
        token, head = row // heads, row % heads
    else:
        token = (row.to(tl.int32) // heads.to(tl.int32)).to(tl.int64)
        head = row - token * heads
    valid, page, offset = locate_slots(slots, token, WIDE)
    _store_rows(keys, token, head, valid, page, offset, SMALLEST_SCALE, NATIVE)
    _store_rows(values, token, head, valid, page, offset, SMALLEST_SCALE, NATIVE)


@triton.jit
def _store_rows(x, token, head, valid, page, offset, SMALLEST_SCALE: tl.constexpr, NATIVE: tl.constexpr):
    FORM: tl.constexpr = x.form
    column = tl.arange(0, FORM.block)[None, :]
    mask = valid[:, None] & (column < FORM.width)
    # [BLOCK_R, block]
    elements = tl.load(head_row(x.rows, token, head)[:, None] + column, mask=mask, other=0.0)
    if FORM.dtype is not None:
        elements = to_float32(elements)
        scale_at = page * x.scale_page_stride + offset * x.scale_slot_stride + head * x.scale_head_stride
        if FORM.writes_scale:
            # Compared as integers, magnitudes keep their order and NaN is the largest; a float maximum would drop NaN.
            amax = tl.max(elements.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
            scale = tl.div_rn(amax, FORM.largest)
            scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
            tl.store(x.scale + scale_at, scale, mask=valid)
        elif x.scale is not None:
            scale = tl.load(x.scale + scale_at, mask=valid, other=1.0)
        else:
            scale = tl.full(page.shape, 1.0, tl.float32) * x.scale_value
        elements = tl.div_rn(elements, tl.broadcast_to(scale[:, None], elements.shape))
        if FORM.dtype == "torch.int8":
            elements = float_to_int8(elements)
        elif FORM.dtype == "torch.float8_e5m2":
            elements = float_to_e5m2(elements)
        else:
            elements = float_to_e4m3(elements, NATIVE)
    cache_offset = page * x.page_stride + offset * x.slot_stride + head * x.head_stride
    within = column
    if FORM.piece < FORM.width:
        within = (column // FORM.piece).to(tl.int64) * x.piece_stride * FORM.cache_align + column % FORM.piece
    tl.store((x.cache + cache_offset * FORM.cache_align)[:, None] + within, elements, mask=mask)
