"""Norms, rotation and unquantized cache writes in Triton. Each element is read once and written once."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots, slots_of
from flashlatte.kernels.triton.cache_layout import cdiv
from flashlatte.kernels.triton.fp8 import cast
from flashlatte.kernels.triton.rotate import (
    TokenRotation,
    load_rotation,
    pair_columns,
    rotate_pairs,
    rotate_rows,
    rotation_of,
)
from flashlatte.kernels.triton.row_norm import RowNorm, row_norm, store_norm
from flashlatte.kernels.triton.rows import CacheRows, HeadRows, cache_rows, head_row, head_rows, slot_row, token_row
from flashlatte.ops.norm_rope.reference import LatentRowsParams
from flashlatte.runtime.triton_kernel import kernel

ROWS_WARPS = 4
HEADS, HEADS_WARPS = 32, 4


def latent_rows(params: LatentRowsParams) -> None:
    cache, slot_mapping = params.cache, params.slot_mapping
    tokens = params.kv_a.shape[0]
    slots = Slots(None, 0, tokens, 0, 1)
    if cache is not None and slot_mapping is not None:
        slots = slots_of(slot_mapping, cache)
    latent_rows_kernel[(tokens * (1 if params.q_a is None else 2),)](
        row_norm(params.kv_a, params.weight, params.rows, params.eps, align=1),
        row_norm(params.q_a, params.q_weight, params.q_out, params.q_eps, align=1),
        rotation_of(params.table, params.positions),
        cache_rows(cache, strided=True, align=1),
        slots,
        PAIRS=params.table.shape[1] // 2,
        INTERLEAVED=params.interleaved,
        WIDE=slots.num_slots >= 2**31,
        num_warps=ROWS_WARPS,
    )


def rotate_heads(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool, out: torch.Tensor
) -> None:
    tokens, heads, rope_dim = x.shape
    head_blocks = cdiv(heads, HEADS)
    rotate_heads_kernel[(tokens * head_blocks,)](
        head_rows(x),
        head_rows(out),
        rotation_of(table, positions),
        heads=heads,
        head_blocks=head_blocks,
        PAIRS=rope_dim // 2,
        BLOCK_H=HEADS,
        INTERLEAVED=interleaved,
        num_warps=HEADS_WARPS,
    )


@kernel
def latent_rows_kernel(
    kv: RowNorm,
    q: RowNorm,
    rotation: TokenRotation,
    cache: CacheRows,
    slots: Slots,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The first programs process a token's row each, the following ones a token's query latent."""
    program = tl.program_id(0).to(tl.int64)
    if program >= slots.num_tokens:
        token = program - slots.num_tokens
        if q.out is not None:
            store_norm(q, token, q.out + token * q.width, None, False)
    else:
        LATENT: tl.constexpr = kv.width
        out_row = kv.out + program * (LATENT + 2 * PAIRS)
        row_in_cache, stored = None, False
        if cache.start is not None:
            stored, page, offset = locate_slots(slots, program, WIDE)
            row_in_cache = slot_row(cache, page, offset)
        store_norm(kv, program, out_row, row_in_cache, stored)

        pair = tl.arange(0, triton.next_power_of_2(PAIRS))
        cosine, sine = load_rotation(rotation, program, pair, PAIRS)
        first, second = pair_columns(pair, PAIRS, INTERLEAVED)
        mask = pair < PAIRS
        rope = token_row(kv, program) + LATENT
        x, y = rotate_pairs(rope, out_row + LATENT, first, second, cosine, sine, mask)
        if cache.start is not None:
            # The cache stores the rounded row, also in a wider dtype.
            DTYPE: tl.constexpr = cache.start.dtype.element_ty
            tl.store(row_in_cache + LATENT + first, cast(x, DTYPE), mask=mask & stored)
            tl.store(row_in_cache + LATENT + second, cast(y, DTYPE), mask=mask & stored)


@kernel
def rotate_heads_kernel(
    x: HeadRows,
    out: HeadRows,
    rotation: TokenRotation,
    heads: tl.int32,
    head_blocks: tl.int32,
    PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """BLOCK_H heads of a token. x and out may be the same."""
    BLOCK_PAIRS: tl.constexpr = triton.next_power_of_2(PAIRS)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    cosine, sine = load_rotation(rotation, token, tl.arange(0, BLOCK_PAIRS), PAIRS)
    rotate_rows(
        head_row(x, token, head),
        head_row(out, token, head),
        head < heads,
        cosine[None, :],
        sine[None, :],
        PAIRS,
        BLOCK_H,
        BLOCK_PAIRS,
        INTERLEAVED,
    )
