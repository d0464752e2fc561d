"""``rope_cache_write`` in Triton: the first programs process a token's key each, the following ones some of its
heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots
from flashlatte.kernels.triton.cache_layout import as_bytes, cdiv, row_alignment
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, from_float32, to_float32
from flashlatte.kernels.triton.head_dims import padded
from flashlatte.kernels.triton.rotate import rotate_rows
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.runtime import machine
from flashlatte.runtime.arguments import by_name
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

HEADS, WARPS = 16, 4


def rope_cache_write(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    q_rope: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    layout: CacheFormat,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
) -> None:
    cache = as_bytes(cache)
    num_tokens, rope_dim = slot_mapping.shape[0], k_rope.shape[1]
    heads = 0 if q_rope is None else q_rope.shape[1]
    head_blocks = cdiv(heads, HEADS)
    q_unit = 1 if q_rope is None else row_alignment(q_rope, 0, 1)
    num_slots = cache.shape[0] * cache.shape[1]
    rope_cache_write_kernel[(num_tokens * (1 + head_blocks),)](
        *by_name(
            rope_cache_write_kernel,
            cache=cache,
            slot_mapping=slot_mapping,
            latent=latent,
            k_rope=k_rope,
            q_rope=q_rope,
            positions=positions,
            cos_sin=cos_sin,
            scale_tensor=scale_tensor,
            scale_value=scale_value,
            num_tokens=num_tokens,
            heads=heads,
            head_blocks=head_blocks,
            num_positions=cos_sin.shape[0],
            num_slots=num_slots,
            page_size=cache.shape[1],
            slot_stride=slot_mapping.stride(0),
            position_stride=positions.stride(0),
            table_stride=stride_in_use(cos_sin, 0),
            latent_stride=stride_in_use(latent, 0),
            k_stride=stride_in_use(k_rope, 0),
            q_stride=0 if q_rope is None else stride_in_use(q_rope, 0) // q_unit,
            q_head_stride=0 if q_rope is None else stride_in_use(q_rope, 1) // q_unit,
            page_stride=stride_in_use(cache, 0),
            row_stride=stride_in_use(cache, 1),
        ),
        LATENT=latent.shape[1],
        PAIRS=rope_dim // 2,
        BLOCK_LATENT=padded(latent.shape[1]),
        BLOCK_PAIRS=padded(rope_dim // 2),
        BLOCK_H=HEADS,
        Q_ALIGN=q_unit,
        INTERLEAVED=interleaved,
        WIDE=num_slots >= 2**31,
        NATIVE=converts_e4m3(cache.device),
        INTERPRETED=machine.interpreting(),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


@kernel(by_element=("slot_mapping", "positions"))
def rope_cache_write_kernel(
    cache,
    slot_mapping,
    latent,
    k_rope,
    q_rope,
    positions,
    cos_sin,
    scale_tensor,
    scale_value: tl.float32,
    num_tokens: tl.int64,
    heads: tl.int32,
    head_blocks: tl.int32,
    num_positions: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    slot_stride: tl.int64,
    position_stride: tl.int64,
    table_stride: tl.int64,
    latent_stride: tl.int64,
    k_stride: tl.int64,
    q_stride: tl.int64,
    q_head_stride: tl.int64,
    page_stride: tl.int64,
    row_stride: tl.int64,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The first programs process one token's key each, the following ones BLOCK_H heads of one token's query.

    Strides of the query are in units of Q_ALIGN elements.
    """
    program = tl.program_id(0).to(tl.int64)
    is_key = program < num_tokens
    behind = tl.maximum(program - num_tokens, 0)
    of_query = behind // tl.maximum(head_blocks, 1)
    token = tl.where(is_key, program, of_query)
    position = tl.load(positions + token * position_stride).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    in_rope = pair < PAIRS
    table = cos_sin + position * table_stride
    # [1, BLOCK_PAIRS]
    cosine = to_float32(tl.load(table + pair, mask=in_rope, other=0.0), INTERPRETED)
    sine = to_float32(tl.load(table + PAIRS + pair, mask=in_rope, other=0.0), INTERPRETED)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + PAIRS

    if is_key:
        row = k_rope + token * k_stride
        a, b = rotate_in_place(row, first, second, cosine, sine, in_rope, INTERPRETED)
        slots = Slots(slot_mapping, slot_stride, num_tokens, num_slots, page_size)
        valid, page, offset = locate_slots(slots, token, WIDE)
        cache_row = cache + page * page_stride + offset * row_stride
        scale = scale_value if scale_tensor is None else tl.load(scale_tensor)
        store_elements(cache_row + LATENT + first, a, scale, in_rope & valid, NATIVE, INTERPRETED)
        store_elements(cache_row + LATENT + second, b, scale, in_rope & valid, NATIVE, INTERPRETED)
        column = tl.arange(0, BLOCK_LATENT)[None, :]
        inside = (column < LATENT) & valid
        elements = tl.load(latent + token * latent_stride + column, mask=inside, other=0.0)
        store_elements(cache_row + column, elements, scale, inside, NATIVE, INTERPRETED)
    elif q_rope is not None:
        head = (behind - of_query * head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        rows = q_rope + (token * q_stride + head * q_head_stride) * Q_ALIGN
        rotate_rows(rows, rows, head < heads, cosine, sine, PAIRS, BLOCK_H, BLOCK_PAIRS, INTERLEAVED, INTERPRETED)


@triton.jit
def rotate_in_place(rows, first, second, cosine, sine, mask, INTERPRETED: tl.constexpr):
    """Rotate and round the elements of each pair, and store them in place."""
    a = to_float32(tl.load(rows + first, mask=mask, other=0.0), INTERPRETED)
    b = to_float32(tl.load(rows + second, mask=mask, other=0.0), INTERPRETED)
    x = from_float32(a * cosine - b * sine, rows.dtype.element_ty, INTERPRETED)
    y = from_float32(b * cosine + a * sine, rows.dtype.element_ty, INTERPRETED)
    tl.store(rows + first, x, mask=mask)
    tl.store(rows + second, y, mask=mask)
    return x, y


@triton.jit
def store_elements(places, x, scale, mask, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr):
    """x in the cache's dtype; bytes (uint8) are e4m3 of x / scale."""
    if places.dtype.element_ty == tl.uint8:
        x = to_float32(x, INTERPRETED)
        x = float_to_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale), NATIVE)
    elif places.dtype.element_ty != x.dtype:
        x = from_float32(to_float32(x, INTERPRETED), places.dtype.element_ty, INTERPRETED)
    tl.store(places, x, mask=mask)
