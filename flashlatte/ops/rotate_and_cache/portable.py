"""``rotate_and_cache`` in Triton: the first programs process a token's key each, the following ones some of its
heads."""

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots
from flashlatte.kernels.triton.cache_layout import alignment_elements, as_bytes, cdiv
from flashlatte.kernels.triton.cache_row import CacheSlot, row_bytes, store_row
from flashlatte.kernels.triton.fp8 import converts_e4m3, from_float32, to_float32
from flashlatte.kernels.triton.rotate import rotate_tail
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

# Query elements and warps of a program.
NUMBERS, WARPS = 1024, 1


def rotate_and_cache(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_eps: float | None,
    layout: CacheFormat,
    scale_rounding: str,
    out: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    cache = as_bytes(cache)
    tokens, heads, head_dim = q.shape
    page_stride = stride_in_use(cache, 0)
    # The token stride of one-byte formats is the format's.
    row_stride = 0 if cache.element_size() == 1 else stride_in_use(cache, 1)
    unit = alignment_elements(cache, page_stride, row_stride)
    q_strides = stride_in_use(q, 0), stride_in_use(q, 1)
    out_strides = stride_in_use(out, 0), stride_in_use(out, 1)
    q_unit = alignment_elements(q, *q_strides)
    out_unit = alignment_elements(out, *out_strides)
    kv_unit = alignment_elements(kv, stride_in_use(kv, 0))
    block = min(NUMBERS // head_dim, 32)
    head_blocks = cdiv(heads, block)
    num_slots = cache.shape[0] * cache.shape[1]
    rotate_and_cache_kernel[(tokens * (1 + head_blocks),)](
        q=q,
        kv=kv,
        cos_sin=cos_sin,
        positions=positions,
        slot_mapping=slot_mapping,
        out=out,
        cache=cache,
        q_eps=0.0 if q_eps is None else q_eps,
        num_tokens=tokens,
        heads=heads,
        head_blocks=head_blocks,
        num_positions=cos_sin.shape[0],
        num_slots=num_slots,
        page_size=cache.shape[1],
        position_stride=positions.stride(0),
        slot_stride=slot_mapping.stride(0),
        q_stride=q_strides[0] // q_unit,
        q_head_stride=q_strides[1] // q_unit,
        out_stride=out_strides[0] // out_unit,
        out_head_stride=out_strides[1] // out_unit,
        kv_stride=stride_in_use(kv, 0) // kv_unit,
        page_stride=page_stride // unit,
        row_stride=row_stride // unit,
        D=head_dim,
        ROPE=cos_sin.shape[1],
        NORM=q_eps is not None,
        FORMAT=row_bytes(layout, scale_rounding),
        Q_ALIGN=q_unit,
        OUT_ALIGN=out_unit,
        KV_ALIGN=kv_unit,
        ALIGN=unit,
        WIDE=num_slots >= 2**31,
        NATIVE=converts_e4m3(cache.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_H=block,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


@kernel(by_element=("positions", "slot_mapping"))
def rotate_and_cache_kernel(
    q,
    kv,
    cos_sin,
    positions,
    slot_mapping,
    out,
    cache,
    q_eps: tl.float32,
    num_tokens: tl.int64,
    heads: tl.int32,
    head_blocks: tl.int32,
    num_positions: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    position_stride: tl.int64,
    slot_stride: tl.int64,
    q_stride: tl.int64,
    q_head_stride: tl.int64,
    out_stride: tl.int64,
    out_head_stride: tl.int64,
    kv_stride: tl.int64,
    page_stride: tl.int64,
    row_stride: tl.int64,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    KV_ALIGN: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """q and out may be the same tensor: a program reads its heads before it writes them."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    if program < num_tokens:
        slots = Slots(slot_mapping, slot_stride, num_tokens, num_slots, page_size)
        valid, page, offset = locate_slots(slots, program, WIDE)
        if valid:
            position = tl.load(positions + program * position_stride).to(tl.int64)
            x = to_float32(tl.load(kv + program * kv_stride * KV_ALIGN + column), INTERPRETED)  # [1, D]
            x = rotate_tail(x, cos_sin, position, num_positions, 1, D, ROPE)
            cache_slot = CacheSlot(cache, page_stride, row_stride, page_size, page, offset, valid)
            store_row(x, cache_slot, D, FORMAT, ALIGN, NATIVE, INTERPRETED)
    else:
        program -= num_tokens
        token = program // head_blocks
        head = (program % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < heads)[:, None] & (column < D)
        position = tl.load(positions + token * position_stride).to(tl.int64)
        q_row = q + (token * q_stride + head * q_head_stride) * Q_ALIGN
        x = to_float32(tl.load(q_row[:, None] + column, mask=inside, other=0.0), INTERPRETED)  # [BLOCK_H, D]
        if NORM:
            x = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + q_eps)[:, None]
        x = rotate_tail(x, cos_sin, position, num_positions, BLOCK_H, D, ROPE)
        out_row = out + (token * out_stride + head * out_head_stride) * OUT_ALIGN
        tl.store(out_row[:, None] + column, from_float32(x, out.dtype.element_ty, INTERPRETED), mask=inside)
