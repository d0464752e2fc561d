"""``reshape_and_cache`` in Triton: a program writes rows (token, head) of keys and of values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots
from flashlatte.kernels.triton.cache_layout import alignment_elements, cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, float_to_e5m2, float_to_int8, to_float32
from flashlatte.kv_cache.one_byte import LARGEST, SMALLEST_SCALE
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

NUMBERS = 4096  # of a key tile
NUM_WARPS = 4


class KeyValueRows(NamedTuple):
    """Rows of heads: their source, and the cache and scales that they are written to.

    Strides, except ``scale_*``, are divided by the alignment of their tensor. A scale's strides are 0 if it applies to
    a whole head or to all.
    """

    rows: Any
    token_stride: Any
    head_stride: Any
    cache: Any
    page_stride: Any
    slot_stride: Any
    cache_head_stride: Any
    piece_stride: Any
    scale: Any
    scale_value: Any
    scale_page_stride: Any
    scale_slot_stride: Any
    scale_head_stride: Any


def reshape_and_cache(
    key: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    k_scale_value: float,
    value: torch.Tensor,
    v_cache: torch.Tensor,
    v_scale: torch.Tensor | None,
    v_scale_value: float,
) -> None:
    num_pages, page_size, heads = k_cache.shape[:3]
    num_rows = slot_mapping.shape[0] * heads
    num_slots = num_pages * page_size
    rows = max(NUMBERS // max(triton.next_power_of_2(key.shape[2]), triton.next_power_of_2(value.shape[2])), 1)
    reshape_and_cache_kernel[(cdiv(num_rows, rows),)](
        slot_mapping=slot_mapping,
        slot_mapping_stride=slot_mapping.stride(0),
        num_tokens=slot_mapping.shape[0],
        num_slots=num_slots,
        page_size=page_size,
        heads=heads,
        **_arguments("k", key, k_cache, k_scale, k_scale_value),
        **_arguments("v", value, v_cache, v_scale, v_scale_value),
        SMALLEST_SCALE=SMALLEST_SCALE,
        WIDE=max(num_slots, num_rows + rows) >= 2**31,
        NATIVE=converts_e4m3(key.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_R=rows,
        num_warps=NUM_WARPS,
    )


def _arguments(
    side: str, rows: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None, scale_value: float
) -> dict[str, Any]:
    strides = [stride_in_use(rows, axis) for axis in (0, 1)]
    cache_strides = [stride_in_use(cache, axis) for axis in range(4)]
    align = alignment_elements(rows, *strides)
    cache_align = alignment_elements(cache, *cache_strides)
    scale_strides = [0, 0, 0] if scale is None else [0] * (3 - scale.dim()) + list(scale.stride())
    if scale is not None and scale.numel() == 1:
        scale_strides = [0, 0, 0]
    values = KeyValueRows(
        rows,
        *(stride // align for stride in strides),
        cache.view(torch.uint8) if cache.dtype in LARGEST else cache,
        *(stride // cache_align for stride in cache_strides),
        scale,
        scale_value,
        *scale_strides,
    )
    return {f"{side}_{name}": value for name, value in values._asdict().items()} | {
        f"{side.upper()}_WIDTH": rows.shape[2],
        f"{side.upper()}_BLOCK": triton.next_power_of_2(rows.shape[2]),
        f"{side.upper()}_PIECE": cache.shape[4],
        f"{side.upper()}_ALIGN": align,
        f"{side.upper()}_CACHE_ALIGN": cache_align,
        f"{side.upper()}_DTYPE": str(cache.dtype) if cache.dtype in LARGEST else None,
        f"{side.upper()}_LARGEST": LARGEST.get(cache.dtype, 0.0),
        f"{side.upper()}_WRITES_SCALE": scale is not None and scale.dim() == 3,
    }


@triton.jit
def _store_rows(
    x,
    token,
    head,
    valid,
    page,
    offset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
    LARGEST: tl.constexpr,
    WRITES_SCALE: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    mask = valid[:, None] & (column < WIDTH)
    row = x.rows + (token * x.token_stride + head * x.head_stride) * ALIGN
    # [BLOCK_R, BLOCK]
    elements = tl.load(row[:, None] + column, mask=mask, other=0.0)
    if DTYPE is not None:
        elements = to_float32(elements, INTERPRETED)
        scale_at = page * x.scale_page_stride + offset * x.scale_slot_stride + head * x.scale_head_stride
        if WRITES_SCALE:
            # Compared as integers, magnitudes keep their order and NaN is the largest; a float maximum would drop NaN.
            amax = tl.max(elements.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
            scale = tl.div_rn(amax, LARGEST)
            scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
            tl.store(x.scale + scale_at, scale, mask=valid)
        elif x.scale is not None:
            scale = tl.load(x.scale + scale_at, mask=valid, other=1.0)
        else:
            scale = tl.full(page.shape, 1.0, tl.float32) * x.scale_value
        elements = tl.div_rn(elements, tl.broadcast_to(scale[:, None], elements.shape))
        if DTYPE == "torch.int8":
            elements = float_to_int8(elements)
        elif DTYPE == "torch.float8_e5m2":
            elements = float_to_e5m2(elements)
        else:
            elements = float_to_e4m3(elements, NATIVE)
    cache_row = x.cache + (page * x.page_stride + offset * x.slot_stride + head * x.cache_head_stride) * CACHE_ALIGN
    within = column
    if PIECE < WIDTH:
        within = (column // PIECE).to(tl.int64) * x.piece_stride * CACHE_ALIGN + column % PIECE
    tl.store(cache_row[:, None] + within, elements, mask=mask)


@kernel(by_element=("slot_mapping",))
def reshape_and_cache_kernel(
    slot_mapping,
    slot_mapping_stride: tl.int64,
    num_tokens: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    heads: tl.int64,
    k_rows,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    k_cache,
    k_page_stride: tl.int64,
    k_slot_stride: tl.int64,
    k_cache_head_stride: tl.int64,
    k_piece_stride: tl.int64,
    k_scale,
    k_scale_value: tl.float32,
    k_scale_page_stride: tl.int64,
    k_scale_slot_stride: tl.int64,
    k_scale_head_stride: tl.int64,
    v_rows,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    v_cache,
    v_page_stride: tl.int64,
    v_slot_stride: tl.int64,
    v_cache_head_stride: tl.int64,
    v_piece_stride: tl.int64,
    v_scale,
    v_scale_value: tl.float32,
    v_scale_page_stride: tl.int64,
    v_scale_slot_stride: tl.int64,
    v_scale_head_stride: tl.int64,
    K_WIDTH: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_PIECE: tl.constexpr,
    K_ALIGN: tl.constexpr,
    K_CACHE_ALIGN: tl.constexpr,
    K_DTYPE: tl.constexpr,
    K_LARGEST: tl.constexpr,
    K_WRITES_SCALE: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_PIECE: tl.constexpr,
    V_ALIGN: tl.constexpr,
    V_CACHE_ALIGN: tl.constexpr,
    V_DTYPE: tl.constexpr,
    V_LARGEST: tl.constexpr,
    V_WRITES_SCALE: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write BLOCK_R rows (token, head) of keys and of values; arguments as in ``KeyValueRows``."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    if WIDE:
        token, head = row // heads, row % heads
    else:
        token = (row.to(tl.int32) // heads.to(tl.int32)).to(tl.int64)
        head = row - token * heads
    slots = Slots(slot_mapping, slot_mapping_stride, num_tokens, num_slots, page_size)
    valid, page, offset = locate_slots(slots, token, WIDE)
    keys = KeyValueRows(
        k_rows,
        k_token_stride,
        k_head_stride,
        k_cache,
        k_page_stride,
        k_slot_stride,
        k_cache_head_stride,
        k_piece_stride,
        k_scale,
        k_scale_value,
        k_scale_page_stride,
        k_scale_slot_stride,
        k_scale_head_stride,
    )
    _store_rows(
        keys,
        token,
        head,
        valid,
        page,
        offset,
        K_WIDTH,
        K_BLOCK,
        K_PIECE,
        K_ALIGN,
        K_CACHE_ALIGN,
        K_DTYPE,
        K_LARGEST,
        K_WRITES_SCALE,
        SMALLEST_SCALE,
        NATIVE,
        INTERPRETED,
    )
    values = KeyValueRows(
        v_rows,
        v_token_stride,
        v_head_stride,
        v_cache,
        v_page_stride,
        v_slot_stride,
        v_cache_head_stride,
        v_piece_stride,
        v_scale,
        v_scale_value,
        v_scale_page_stride,
        v_scale_slot_stride,
        v_scale_head_stride,
    )
    _store_rows(
        values,
        token,
        head,
        valid,
        page,
        offset,
        V_WIDTH,
        V_BLOCK,
        V_PIECE,
        V_ALIGN,
        V_CACHE_ALIGN,
        V_DTYPE,
        V_LARGEST,
        V_WRITES_SCALE,
        SMALLEST_SCALE,
        NATIVE,
        INTERPRETED,
    )
