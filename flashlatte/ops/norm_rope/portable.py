"""Norms, rotation and unquantised cache writes in Triton. Each element is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots
from flashlatte.kernels.triton.cache_layout import cdiv, row_alignment
from flashlatte.kernels.triton.fp8 import from_float32, to_float32
from flashlatte.kernels.triton.rotate import rotate_rows
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

ROWS_WARPS = 4
HEADS, HEADS_WARPS = 32, 4


def latent_rows(
    kv_a: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    q_a: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    q_eps: float,
    slot_mapping: torch.Tensor | None,
    rows: torch.Tensor,
    q_out: torch.Tensor | None,
    cache: torch.Tensor | None,
) -> None:
    tokens, latent_dim = kv_a.shape[0], weight.shape[0]
    rank = 0 if q_a is None else q_a.shape[1]
    num_slots, page_size, page_stride, row_stride = 0, 1, 0, 0
    if cache is not None:
        num_slots, page_size = cache.shape[0] * cache.shape[1], cache.shape[1]
        page_stride, row_stride = stride_in_use(cache, 0), stride_in_use(cache, 1)
    latent_rows_kernel[(tokens * (1 if q_a is None else 2),)](
        kv_a=kv_a,
        weight=weight,
        table=table,
        positions=positions,
        q_a=q_a,
        q_weight=q_weight,
        slot_mapping=slot_mapping,
        rows=rows,
        q_out=q_out,
        cache=cache,
        eps=eps,
        q_eps=q_eps,
        num_tokens=tokens,
        num_positions=table.shape[0],
        num_slots=num_slots,
        page_size=page_size,
        kv_stride=stride_in_use(kv_a, 0),
        q_stride=0 if q_a is None else stride_in_use(q_a, 0),
        page_stride=page_stride,
        row_stride=row_stride,
        LATENT=latent_dim,
        PAIRS=table.shape[1] // 2,
        RANK=rank,
        BLOCK_LATENT=triton.next_power_of_2(latent_dim),
        BLOCK_PAIRS=triton.next_power_of_2(table.shape[1] // 2),
        BLOCK_RANK=triton.next_power_of_2(max(rank, 1)),
        INTERLEAVED=interleaved,
        WIDE=num_slots >= 2**31,
        INTERPRETED=machine.interpreting(),
        num_warps=ROWS_WARPS,
    )


def rotate_heads(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool, out: torch.Tensor
) -> None:
    tokens, heads, rope_dim = x.shape
    head_blocks = cdiv(heads, HEADS)
    x_unit, out_unit = row_alignment(x, 0, 1), row_alignment(out, 0, 1)
    rotate_heads_kernel[(tokens * head_blocks,)](
        x=x,
        table=table,
        positions=positions,
        out=out,
        heads=heads,
        head_blocks=head_blocks,
        num_positions=table.shape[0],
        x_stride=stride_in_use(x, 0) // x_unit,
        x_head_stride=stride_in_use(x, 1) // x_unit,
        out_stride=stride_in_use(out, 0) // out_unit,
        out_head_stride=stride_in_use(out, 1) // out_unit,
        PAIRS=rope_dim // 2,
        BLOCK_PAIRS=triton.next_power_of_2(rope_dim // 2),
        BLOCK_H=HEADS,
        X_ALIGN=x_unit,
        OUT_ALIGN=out_unit,
        INTERLEAVED=interleaved,
        INTERPRETED=machine.interpreting(),
        num_warps=HEADS_WARPS,
    )


@kernel(by_element=("positions", "slot_mapping"))
def latent_rows_kernel(
    kv_a,
    weight,
    table,
    positions,
    q_a,
    q_weight,
    slot_mapping,
    rows,
    q_out,
    cache,
    eps: tl.float32,
    q_eps: tl.float32,
    num_tokens: tl.int64,
    num_positions: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    kv_stride: tl.int64,
    q_stride: tl.int64,
    page_stride: tl.int64,
    row_stride: tl.int64,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The first programs process a token's row each, the following ones a token's query latent."""
    program = tl.program_id(0).to(tl.int64)
    if program >= num_tokens:
        token = program - num_tokens
        if q_a is not None:
            q_row, out_row = q_a + token * q_stride, q_out + token * RANK
            store_normalised(q_row, q_weight, out_row, None, False, q_eps, RANK, BLOCK_RANK, INTERPRETED)
    else:
        width: tl.constexpr = LATENT + 2 * PAIRS
        row, out_row = kv_a + program * kv_stride, rows + program * width
        cache_row, stored = None, False
        if cache is not None:
            slots = Slots(slot_mapping, 1, num_tokens, num_slots, page_size)
            stored, page, offset = locate_slots(slots, program, WIDE)
            cache_row = cache + page * page_stride + offset * row_stride
        store_normalised(row, weight, out_row, cache_row, stored, eps, LATENT, BLOCK_LATENT, INTERPRETED)

        pair = tl.arange(0, BLOCK_PAIRS)
        cosine, sine = load_rotation(table, positions, program, num_positions, PAIRS, BLOCK_PAIRS)
        first, second = pair_columns(pair, PAIRS, INTERLEAVED)
        mask = pair < PAIRS
        a = to_float32(tl.load(row + LATENT + first, mask=mask, other=0.0), INTERPRETED)
        b = to_float32(tl.load(row + LATENT + second, mask=mask, other=0.0), INTERPRETED)
        x, y = a * cosine - b * sine, b * cosine + a * sine
        tl.store(out_row + LATENT + first, from_float32(x, rows.dtype.element_ty, INTERPRETED), mask=mask)
        tl.store(out_row + LATENT + second, from_float32(y, rows.dtype.element_ty, INTERPRETED), mask=mask)
        if cache is not None:
            # The cache stores the rounded row, also in a wider dtype.
            x = to_float32(from_float32(x, rows.dtype.element_ty, INTERPRETED), INTERPRETED)
            y = to_float32(from_float32(y, rows.dtype.element_ty, INTERPRETED), INTERPRETED)
            mask = mask & stored
            tl.store(cache_row + LATENT + first, from_float32(x, cache.dtype.element_ty, INTERPRETED), mask=mask)
            tl.store(cache_row + LATENT + second, from_float32(y, cache.dtype.element_ty, INTERPRETED), mask=mask)


@triton.jit
def store_normalised(
    row, weight, out_row, cache_row, stored, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Write the RMSNorm of one row of WIDTH elements to ``out_row`` and, where ``stored``, to ``cache_row``."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = to_float32(tl.load(row + column, mask=inside, other=0.0), INTERPRETED)
    gain = to_float32(tl.load(weight + column, mask=inside, other=0.0), INTERPRETED)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * gain
    rounded = from_float32(x, out_row.dtype.element_ty, INTERPRETED)
    tl.store(out_row + column, rounded, mask=inside)
    if cache_row is not None:
        value = from_float32(to_float32(rounded, INTERPRETED), cache_row.dtype.element_ty, INTERPRETED)
        tl.store(cache_row + column, value, mask=inside & stored)


@triton.jit
def load_rotation(table, positions, token, num_positions, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Cosines and sines of a token: float32 [BLOCK_PAIRS]; positions outside the table are clamped."""
    position = tl.load(positions + token).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    pair = tl.arange(0, BLOCK_PAIRS)
    row = table + position * (2 * PAIRS)
    cosine = tl.load(row + pair, mask=pair < PAIRS, other=0.0)
    return cosine, tl.load(row + PAIRS + pair, mask=pair < PAIRS, other=0.0)


@triton.jit
def pair_columns(pair, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    else:
        return pair, pair + PAIRS


@kernel(by_element=("positions",))
def rotate_heads_kernel(
    x,
    table,
    positions,
    out,
    heads: tl.int32,
    head_blocks: tl.int32,
    num_positions: tl.int64,
    x_stride: tl.int64,
    x_head_stride: tl.int64,
    out_stride: tl.int64,
    out_head_stride: tl.int64,
    PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    X_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """BLOCK_H heads of a token. x and out may be the same. Strides are in units of X_ALIGN and OUT_ALIGN elements."""
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    cosine, sine = load_rotation(table, positions, token, num_positions, PAIRS, BLOCK_PAIRS)
    x_rows = x + (token * x_stride + head * x_head_stride) * X_ALIGN
    out_rows = out + (token * out_stride + head * out_head_stride) * OUT_ALIGN
    rotate_rows(
        x_rows,
        out_rows,
        head < heads,
        cosine[None, :],
        sine[None, :],
        PAIRS,
        BLOCK_H,
        BLOCK_PAIRS,
        INTERLEAVED,
        INTERPRETED,
    )
