"""``rope_cache_write`` in Triton: the first programs process a token's key each, the following ones some of its
heads."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots, slots_of
from flashlatte.kernels.triton.cache_layout import as_bytes, cdiv
from flashlatte.kernels.triton.cache_row import CacheScale, encode_elements, load_scale
from flashlatte.kernels.triton.config import padded
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.rotate import (
    TokenRotation,
    load_rotation,
    pair_columns,
    rotate_pairs,
    rotate_rows,
    rotation_of,
)
from flashlatte.kernels.triton.rows import (
    CacheRows,
    HeadRows,
    TokenRows,
    cache_rows,
    head_row,
    head_rows,
    slot_row,
    token_row,
    token_rows,
)
from flashlatte.ops.rope_cache_write.reference import RopeCacheWriteParams
from flashlatte.runtime.triton_kernel import kernel

HEADS, WARPS = 16, 4


class RopeCacheWriteConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        latent, block_latent: elements of a latent, and of its tile.
        pairs, block_pairs: pairs of a rope part, and of its tile.
        block_h: heads of a program.
        wide: slots exceed 32 bits.
        native: the GPU converts e4m3 in hardware.
    """

    latent: int
    block_latent: int
    pairs: int
    block_pairs: int
    block_h: int
    interleaved: bool
    wide: bool
    native: bool


def rope_cache_write(params: RopeCacheWriteParams) -> None:
    cache, latent, k_rope, q_rope = as_bytes(params.cache), params.latent, params.k_rope, params.q_rope
    slots = slots_of(params.slot_mapping, cache)
    heads = 0 if q_rope is None else q_rope.shape[1]
    head_blocks = cdiv(heads, HEADS)
    pairs = k_rope.shape[1] // 2
    rope_cache_write_kernel[(slots.num_tokens * (1 + head_blocks),)](
        cache_rows(cache, strided=True, align=1),
        slots,
        token_rows(latent, align=1),
        token_rows(k_rope, align=1),
        head_rows(q_rope),
        rotation_of(params.cos_sin, params.positions),
        CacheScale(params.scale_tensor, params.scale_value),
        heads=heads,
        head_blocks=head_blocks,
        CONFIG=RopeCacheWriteConfig(
            latent=latent.shape[1],
            block_latent=padded(latent.shape[1]),
            pairs=pairs,
            block_pairs=padded(pairs),
            block_h=HEADS,
            interleaved=params.interleaved,
            wide=slots.num_slots >= 2**31,
            native=converts_e4m3(cache.device),
        ),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


@kernel
def rope_cache_write_kernel(
    cache: CacheRows,
    slots: Slots,
    latent: TokenRows,
    k_rope: TokenRows,
    q_rope: HeadRows,
    rotation: TokenRotation,
    scale: CacheScale,
    heads: tl.int32,
    head_blocks: tl.int32,
    CONFIG: tl.constexpr,
):
    PAIRS: tl.constexpr = CONFIG.pairs
    program = tl.program_id(0).to(tl.int64)
    is_key = program < slots.num_tokens
    query_program = tl.maximum(program - slots.num_tokens, 0)
    query_token = query_program // tl.maximum(head_blocks, 1)
    token = tl.where(is_key, program, query_token)
    pair = tl.arange(0, CONFIG.block_pairs)[None, :]
    cosine, sine = load_rotation(rotation, token, pair, PAIRS)  # [1, block_pairs]

    if is_key:
        row, in_rope = token_row(k_rope, token), pair < PAIRS
        first, second = pair_columns(pair, PAIRS, CONFIG.interleaved)
        x, y = rotate_pairs(row, row, first, second, cosine, sine, in_rope)
        valid, page, offset = locate_slots(slots, token, CONFIG.wide)
        row_in_cache = slot_row(cache, page, offset)
        factor = load_scale(scale)
        store_elements(row_in_cache + CONFIG.latent + first, x, factor, in_rope & valid, CONFIG)
        store_elements(row_in_cache + CONFIG.latent + second, y, factor, in_rope & valid, CONFIG)
        column = tl.arange(0, CONFIG.block_latent)[None, :]
        inside = (column < CONFIG.latent) & valid
        elements = tl.load(token_row(latent, token) + column, mask=inside, other=0.0)
        store_elements(row_in_cache + column, elements, factor, inside, CONFIG)
    elif q_rope.start is not None:
        head = (query_program - query_token * head_blocks) * CONFIG.block_h + tl.arange(0, CONFIG.block_h)[:, None]
        rows = head_row(q_rope, token, head)
        rotate_rows(
            rows, rows, head < heads, cosine, sine, PAIRS, CONFIG.block_h, CONFIG.block_pairs, CONFIG.interleaved
        )


@triton.jit
def store_elements(pointers, x, scale, mask, CONFIG: tl.constexpr):
    stored = encode_elements(x, pointers.dtype.element_ty, scale, CONFIG.native)
    tl.store(pointers, stored, mask=mask)
