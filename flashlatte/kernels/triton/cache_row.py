"""Encode a float32 row in a cache format and store it in a slot of a paged cache."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import block_scale_byte, store_words, tile_scale_row
from flashlatte.kernels.triton.fp4 import e2m1_code, nvfp4_scales, to_mxfp4
from flashlatte.kernels.triton.fp8 import cast, e4m3_to_float, float_to_e4m3, from_float32, to_float32
from flashlatte.kernels.triton.row_scales import quantize_tiles, scale_rows
from flashlatte.kernels.triton.rows import page_pointers
from flashlatte.kv_cache.formats import BlockScaling, CacheFormat, Tiling
from flashlatte.kv_cache.index_formats import SMALLEST_AMAX, IndexFormat
from flashlatte.runtime.kernel_records import ElementPointer, Float32

_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)


class RowBytes(NamedTuple):
    """The encoding of a row, as a constexpr of a kernel.

    Attributes:
        encoding: "plain" (the cache's dtype), "tiles" (e4m3 with an E8M0 scale per tile, rope in bf16), "blocks" (as
            ``BlockScaling`` says), "e4m3" (with a float32 scale per row) or "e2m1" (with an E8M0 scale per 32
            elements).
        tiling: for "tiles".
        scaling: for "blocks".
        power_of_two: for "e4m3": round scales up to powers of two.
    """

    encoding: str
    tiling: Tiling | None = None
    scaling: BlockScaling | None = None
    power_of_two: bool = False


class CacheScale(NamedTuple):
    """The scale of a one-byte cache: one float32, or ``value`` if ``tensor`` is None."""

    tensor: ElementPointer
    value: Float32


def row_bytes(layout: CacheFormat, scale_rounding: str) -> RowBytes:
    if isinstance(layout, IndexFormat) and layout.encoding in ("e4m3", "e2m1"):
        return RowBytes(layout.encoding, power_of_two=scale_rounding == "power_of_two")
    if layout.tiling is not None:
        return RowBytes("tiles", layout.tiling)
    if layout.block_scaling is not None:
        return RowBytes("blocks", scaling=layout.block_scaling)
    return RowBytes("plain")


@triton.jit
def load_scale(scale):
    return scale.value if scale.tensor is None else tl.load(scale.tensor)


@triton.jit
def encode_elements(x, dtype: tl.constexpr, scale, NATIVE: tl.constexpr):
    """x in the dtype of a cache without tiles; bytes (uint8) are e4m3 of x / scale."""
    if dtype == tl.uint8:
        return float_to_e4m3(tl.div_rn(to_float32(x), scale), NATIVE)
    else:
        return cast(x, dtype)


@triton.jit
def encode_blocks(x, ROWS: tl.constexpr, SCALING: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of float32 x [ROWS, block · blocks] and of its scales [ROWS, blocks]."""
    SCALED: tl.constexpr = SCALING.block * SCALING.blocks
    if SCALING.fp4:
        # [ROWS, blocks, block / 2]
        low, high = tl.split(tl.reshape(x, [ROWS, SCALING.blocks, SCALING.block // 2, 2]))
        scales = nvfp4_scales(low, high, SCALING.rounds_up, NATIVE)
        divisors = tl.broadcast_to(e4m3_to_float(scales, NATIVE)[:, :, None], low.shape)
        codes = e2m1_code(tl.div_rn(low, divisors)) | (e2m1_code(tl.div_rn(high, divisors)) << 4)
        values = tl.reshape(codes, [ROWS, SCALED // 2]).to(tl.uint8)
    else:
        scaled, scale_bits = quantize_tiles(tl.reshape(x, [ROWS, SCALING.blocks, SCALING.block]), True)
        scales = (scale_bits >> 23).to(tl.uint8)
        values = float_to_e4m3(tl.reshape(scaled, [ROWS, SCALED]), NATIVE)
    return values, scales


@triton.jit
def store_row(x, cache, page_size, in_cache, page, offset, D: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Store float32 x [1, D] in the slot of ``page`` and ``offset`` if that is ``in_cache``."""
    column = tl.arange(0, D)[None, :]
    page_start = page_pointers(cache, page)
    valid = in_cache & (column < D)  # [1, D]
    if FORMAT.encoding == "plain":
        row = page_start + offset * cache.row_stride * cache.align
        tl.store(row + column, from_float32(x, cache.start.dtype.element_ty), mask=valid)
    elif FORMAT.encoding == "tiles":
        TILING: tl.constexpr = FORMAT.tiling
        LATENT: tl.constexpr = TILING.tile * TILING.tiles
        row = page_start + offset * TILING.row_bytes
        values, scales = quantize_tiles(tl.reshape(x, [1, D // TILING.tile, TILING.tile]), True)
        codes = tl.reshape(float_to_e4m3(values, NATIVE), [1, D])
        tl.store(row + column, codes, mask=valid & (column < LATENT))
        rope = from_float32(x, tl.bfloat16).to(tl.uint16, bitcast=True)
        store_words(row + TILING.rope_offset, column - LATENT, rope, valid & (column >= LATENT), cache.align)
        tile = tl.arange(0, D // TILING.tile)[None, :]
        # The scales of a token are padded with zero bytes.
        exponents = tl.where(tile < TILING.tiles, scales >> 23, 0).to(tl.uint8)
        scale_row = tile_scale_row(page_start, page_size, offset, TILING)
        tl.store(scale_row + tile, exponents, mask=in_cache & (tile < TILING.padded_tiles))
    elif FORMAT.encoding == "blocks":
        SCALING: tl.constexpr = FORMAT.scaling
        VALUE_BYTES: tl.constexpr = D // 2 if SCALING.fp4 else D
        values, scales = encode_blocks(x, 1, SCALING, NATIVE)
        row = page_start + offset * SCALING.token_bytes
        byte = tl.arange(0, VALUE_BYTES)[None, :]
        tl.store(row + byte, values, mask=in_cache & (byte < VALUE_BYTES))
        block = tl.arange(0, SCALING.blocks)[None, :]
        scale = row + SCALING.scale_offset + block_scale_byte(block, SCALING)
        tl.store(scale, scales, mask=in_cache & (block < SCALING.blocks))
    elif FORMAT.encoding == "e4m3":
        values, scales = scale_rows(x, _SMALLEST_AMAX, FORMAT.power_of_two)  # [1, D], [1]
        tl.store(page_start + offset * D + column, float_to_e4m3(values, NATIVE), mask=valid)
        scale_row = page_start + page_size * D + offset * 4
        word = scales.to(tl.int32, bitcast=True)
        store_words(scale_row, tl.arange(0, 1), word, in_cache & (tl.arange(0, 1) == 0), cache.align)
    else:
        packed, exponents = to_mxfp4(x, 1, D)
        byte = tl.arange(0, D // 2)[None, :]
        tl.store(page_start + offset * (D // 2) + byte, packed, mask=in_cache & (byte < D // 2))
        group = tl.arange(0, D // 32)[None, :]
        scale_row = page_start + page_size * (D // 2) + offset * (D // 32)
        tl.store(scale_row + group, exponents, mask=in_cache & (group < D // 32))
