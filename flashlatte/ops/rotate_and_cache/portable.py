"""``rotate_and_cache`` in Triton: the first programs process a token's key each, the following ones some of its
heads."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots, slots_of
from flashlatte.kernels.triton.cache_layout import as_bytes, cdiv
from flashlatte.kernels.triton.cache_row import RowBytes, row_bytes, store_row
from flashlatte.kernels.triton.fp8 import converts_e4m3, from_float32, to_float32
from flashlatte.kernels.triton.rotate import TokenRotation, load_position, rotate_tail, rotation_of
from flashlatte.kernels.triton.rows import (
    CacheRows,
    HeadRows,
    TokenRows,
    cache_rows,
    head_row,
    head_rows,
    token_row,
    token_rows,
)
from flashlatte.ops.rotate_and_cache.reference import RotateAndCacheParams
from flashlatte.runtime.triton_kernel import kernel

# Query elements and warps of a program.
ELEMENTS, WARPS = 1024, 1


class RotateAndCacheConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        head_dim, rope_dim: elements of a row, and of its rotated part.
        norm: the heads of queries are normalized.
        row_bytes: the encoding of a key.
        block_h: heads of a program.
        wide: slots exceed 32 bits.
        native: the GPU converts e4m3 in hardware.
    """

    head_dim: int
    rope_dim: int
    norm: bool
    row_bytes: RowBytes
    block_h: int
    wide: bool
    native: bool


def rotate_and_cache(params: RotateAndCacheParams) -> None:
    q, cache = params.queries, as_bytes(params.cache)
    tokens, heads, head_dim = q.shape
    block = min(ELEMENTS // head_dim, 32)
    head_blocks = cdiv(heads, block)
    slots = slots_of(params.slot_mapping, cache)
    rotate_and_cache_kernel[(tokens * (1 + head_blocks),)](
        head_rows(q),
        token_rows(params.kv),
        rotation_of(params.cos_sin, params.positions),
        slots,
        head_rows(params.out),
        # The token stride of one-byte formats is the format's.
        cache_rows(cache, strided=cache.element_size() > 1),
        q_eps=0.0 if params.q_eps is None else params.q_eps,
        heads=heads,
        head_blocks=head_blocks,
        CONFIG=RotateAndCacheConfig(
            head_dim=head_dim,
            rope_dim=params.cos_sin.shape[1],
            norm=params.q_eps is not None,
            row_bytes=row_bytes(params.layout, params.scale_rounding),
            block_h=block,
            wide=slots.num_slots >= 2**31,
            native=converts_e4m3(cache.device),
        ),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


@kernel
def rotate_and_cache_kernel(
    q: HeadRows,
    kv: TokenRows,
    rotation: TokenRotation,
    slots: Slots,
    out: HeadRows,
    cache: CacheRows,
    q_eps: tl.float32,
    heads: tl.int32,
    head_blocks: tl.int32,
    CONFIG: tl.constexpr,
):
    """q and out may be the same tensor: a program reads its heads before it writes them."""
    D: tl.constexpr = CONFIG.head_dim
    ROW_BYTES: tl.constexpr = CONFIG.row_bytes
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    if program < slots.num_tokens:
        valid, page, offset = locate_slots(slots, program, CONFIG.wide)
        if valid:
            position = load_position(rotation, program)
            x = to_float32(tl.load(token_row(kv, program) + column))  # [1, D]
            x = rotate_tail(x, rotation.cos_sin, position, rotation.num_positions, 1, D, CONFIG.rope_dim)
            store_row(x, cache, slots.page_size, valid, page, offset, D, ROW_BYTES, CONFIG.native)
    else:
        program -= slots.num_tokens
        token = program // head_blocks
        head = (program % head_blocks) * CONFIG.block_h + tl.arange(0, CONFIG.block_h)
        inside = (head < heads)[:, None] & (column < D)
        position = load_position(rotation, token)
        q_row = head_row(q, token, head)
        x = to_float32(tl.load(q_row[:, None] + column, mask=inside, other=0.0))  # [block_h, D]
        if CONFIG.norm:
            x = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + q_eps)[:, None]
        x = rotate_tail(x, rotation.cos_sin, position, rotation.num_positions, CONFIG.block_h, D, CONFIG.rope_dim)
        out_row = head_row(out, token, head)[:, None]
        DTYPE: tl.constexpr = out.start.dtype.element_ty
        tl.store(out_row + column, from_float32(x, DTYPE), mask=inside)
