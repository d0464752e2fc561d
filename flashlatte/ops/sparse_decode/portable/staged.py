"""Tiles of keys from selected e4m3 tokens and their scales, prefetched to shared memory.

Tiles are prefetched in the cache's format, two steps ahead, and need no registers. On Hopper this wins v32 by 16 to 19%
and model1 by 11% (docs/notes/portable.md). ``tiles`` loads words.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import e4m3_to_float, e8m0_to_float, from_float32, to_float32
from flashlatte.kernels.triton.online_softmax import RowTile
from flashlatte.ops.sparse_decode.portable.tiles import locate, locate_bytes, locate_scale_bytes
from flashlatte.runtime.triton_kernel import INTERPRETED

_LATENT = tl.constexpr(512)
_ROPE_DIM = tl.constexpr(64)


class Codes(NamedTuple):
    """Tokens without their scales.

    Attributes:
        latent: e4m3 bits [tokens, 512]; zeros beyond the 448 elements of ``model1``.
        rope: bf16 [tokens, 64]; undefined in formats without rope.
        valid: mask of valid tokens.
    """

    latent: Any
    rope: Any
    valid: Any


@triton.jit
def load_codes(cache, index, cache_layout: tl.constexpr):
    """Load tokens of a cache. Invalid tokens are zeros."""
    TILING: tl.constexpr = cache_layout.tiling
    valid, page, offset = locate(cache, index, cache_layout)
    in_use = valid[:, None]
    column = tl.arange(0, _LATENT)[None, :]
    if TILING is None:
        rows = (
            cache.k_cache + locate_bytes(cache, page, offset, cache_layout.scaling.token_bytes, cache_layout)[:, None]
        )
        latent = tl.load(rows + column, mask=in_use, other=0)
        # A placeholder: there is no rope, and Triton 3.6 cannot return None.
        return Codes(latent, latent, valid)
    else:
        rows = cache.k_cache + locate_bytes(cache, page, offset, TILING.row_bytes, cache_layout)[:, None]
        HAS: tl.constexpr = TILING.tile * TILING.tiles
        latent = tl.load(rows + column, mask=in_use & (column < HAS) if HAS < _LATENT else in_use, other=0)
        if TILING.rope_offset == TILING.row_bytes:
            return Codes(latent, latent, valid)
        else:
            rope_row = (rows + TILING.rope_offset).to(tl.pointer_type(tl.bfloat16))
            rope = tl.load(rope_row + tl.arange(0, _ROPE_DIM)[None, :], mask=in_use, other=0)
            return Codes(latent, rope, valid)


@triton.jit
def load_scales(cache, index, cache_layout: tl.constexpr):
    """The scales of tokens, float32 [tokens, tiles].

    Shared memory has no room for two steps of scales, so they are loaded in pieces of less than four bytes, the minimum
    of an asynchronous copy, and kept in registers.
    """
    TILING: tl.constexpr = cache_layout.tiling
    valid, page, offset = locate(cache, index, cache_layout)
    in_use = valid[:, None]
    if TILING is None:
        SCALING: tl.constexpr = cache_layout.scaling
        rows = cache.k_cache + locate_bytes(cache, page, offset, SCALING.token_bytes, cache_layout)[:, None]
        rows += SCALING.scale_offset
        return e8m0_to_float(tl.load(rows + tl.arange(0, SCALING.blocks)[None, :], mask=in_use, other=0))
    else:
        number = tl.arange(0, TILING.padded_tiles)[None, :]
        if TILING.e8m0:
            rows = cache.k_cache + locate_scale_bytes(cache, page, offset, TILING, cache_layout)[:, None]
            return e8m0_to_float(tl.load(rows + number, mask=in_use & (number < TILING.tiles), other=0))
        else:
            rows = cache.k_cache + locate_bytes(cache, page, offset, TILING.row_bytes, cache_layout)[:, None]
            halves = (rows + TILING.tile * TILING.tiles).to(tl.pointer_type(tl.uint16)) + 2 * number
            low = tl.load(halves, mask=in_use, other=0).to(tl.uint32)
            high = tl.load(halves + 1, mask=in_use, other=0).to(tl.uint32)
            return ((high << 16) | low).to(tl.float32, bitcast=True)


@triton.jit
def dequantize(codes, scales, dtype: tl.constexpr, cache_layout: tl.constexpr, step: tl.constexpr):
    """Dequantize tokens to ``dtype``, rounded to bf16 once: 512 latent elements and, for ``v32``, 64 rope elements."""
    BLOCK_N: tl.constexpr = scales.shape[0]
    TILES: tl.constexpr = scales.shape[1]
    bits = tl.reshape(codes.latent, [BLOCK_N, TILES, _LATENT // TILES])
    latent = e4m3_to_float(bits, cache_layout.native) * scales[:, :, None]
    latent = from_float32(latent, tl.bfloat16)
    TILING: tl.constexpr = cache_layout.tiling
    if TILING is None or TILING.rope_offset == TILING.row_bytes:
        rope = latent
    else:
        rope = to_float32(codes.rope) if INTERPRETED else codes.rope
        if TILING.e8m0:
            # The last tile's elements are still 0.
            in_rope = (tl.arange(0, TILES) == TILES - 1).to(rope.dtype)
            in_rope = tl.broadcast_to(in_rope[None, :, None], latent.shape)
            latent = tl.fma(tl.broadcast_to(rope[:, None, :], latent.shape), in_rope, latent.to(rope.dtype))
        rope = rope if INTERPRETED else rope.to(dtype)
    latent = tl.reshape(latent, [BLOCK_N, _LATENT])
    latent = to_float32(latent) if INTERPRETED else latent.to(dtype)
    return RowTile(latent, rope)
