"""Selected cache tokens as tiles of keys.

A key has a latent part, which is also its value, and a rope part, which may be empty. The latent part is 512 e4m3
values in ``v32``; these are the whole row in ``v32_no_rope``; the whole row, 448 e4m3 and 64 bf16 values, in
``model1``; 512 e4m3 values in ``v41``; and 512 e2m1 values in ``v41_fp4``. Invalid tokens are zeros.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import load_words
from flashlatte.kernels.triton.fp8 import e4m3_to_float, e8m0_to_float, from_float32, to_float32
from flashlatte.kernels.triton.online_softmax import RowTile
from flashlatte.kv_cache.formats import BlockScaling, Tiling
from flashlatte.runtime.kernel_records import Int64, Pointer
from flashlatte.runtime.triton_kernel import INTERPRETED

# Words of four latent elements.
_WORDS = tl.constexpr(128)
_ROPE_DIM = tl.constexpr(64)
_TWO_120 = tl.constexpr(1.329227995784916e36)
_TWO_126 = tl.constexpr(8.507059173023462e37)


class SparseCache(NamedTuple):
    """A cache, its strides and its number of tokens.

    Attributes:
        k_cache: [pages, page_size, width]; bytes in the formats with scales.
        stride_page: in units of ``TokenAddress.align`` bytes, or elements in the formats without scales.
        stride_token: likewise; not used in the formats with scales.
        num_slots: number of tokens; an index from num_slots on is invalid. At most 2^31 for int32 indices.
    """

    k_cache: Pointer
    stride_page: Int64
    stride_token: Int64
    num_slots: Int64


class TokenAddress(NamedTuple):
    """The constants of a token's address, in one constexpr argument, which Triton serializes as JSON.

    Attributes:
        tiling: tiling of ``v32``, ``v32_no_rope`` and ``model1``, else None.
        scaling: block scaling of ``v41`` and ``v41_fp4``, else None. Without either, rows are elements in q's dtype.
        native: the GPU converts e4m3 (``fp8.converts_e4m3``).
        page_size: tokens of a page.
        wide: valid indices or addresses, in units of ``align``, may exceed 2^32, which needs 64-bit arithmetic.
        align: unit of a cache's strides.
    """

    tiling: Tiling | None
    scaling: BlockScaling | None
    native: bool
    page_size: int
    wide: bool
    align: int


class Packed(NamedTuple):
    """Packed tokens of a cache with scales.

    Attributes:
        words: int32 [tokens, 128], four e4m3 values each; zeros beyond the 448 values of ``model1``. Or [tokens, 64],
            eight e2m1 values each (``v41_fp4``).
        scales: float32 [tokens, 4] (``v32``, ``v32_no_rope``), E8M0 bytes [tokens, 8] (``model1``) or [tokens, 16]
            (``v41``), or e4m3 bytes [tokens, 32].
        rope: bf16 bits [tokens, 64]; undefined in formats without rope.
        valid: which tokens are.
    """

    words: Any
    scales: Any
    rope: Any
    valid: Any


@triton.jit
def locate(cache, index, cache_layout: tl.constexpr):
    """The mask of valid indices, and their pages and offsets, which are undefined where invalid."""
    unsigned: tl.constexpr = tl.uint64 if index.dtype == tl.int64 else tl.uint32
    valid = index.to(unsigned, bitcast=True) < cache.num_slots.to(unsigned)
    slot = index.to(tl.uint64 if cache_layout.wide else tl.uint32)
    page = slot // cache_layout.page_size
    return valid, page, slot - page * cache_layout.page_size


@triton.jit
def locate_rows(cache, index, cache_layout: tl.constexpr):
    """The mask of valid indices, and the offsets of their rows in a cache without scales."""
    valid, page, offset = locate(cache, index, cache_layout)
    units = page * cache.stride_page.to(page.dtype) + offset * cache.stride_token.to(page.dtype)
    return valid, units.to(tl.int64) * cache_layout.align


@triton.jit
def locate_bytes(cache, page, offset, ROW_BYTES: tl.constexpr, cache_layout: tl.constexpr):
    """The addresses of rows of ROW_BYTES, a multiple of ``align``, in a cache with scales."""
    units = page * cache.stride_page.to(page.dtype) + offset * (ROW_BYTES // cache_layout.align)
    return units.to(tl.int64) * cache_layout.align


@triton.jit
def locate_scale_bytes(cache, page, offset, TILING: tl.constexpr, cache_layout: tl.constexpr):
    """The addresses of the scales of tokens in the scale plane of a page."""
    page_start = locate_bytes(cache, page, 0, TILING.row_bytes, cache_layout)
    return page_start + cache_layout.page_size * TILING.row_bytes + offset.to(tl.int64) * TILING.padded_tiles


@triton.jit
def load_packed(cache, index, cache_layout: tl.constexpr):
    """Load tokens of a cache with scales, for ``unpack``."""
    if cache_layout.scaling is not None:
        SCALING: tl.constexpr = cache_layout.scaling
        return _load_blocks(cache, index, cache_layout, SCALING)
    else:
        TILING: tl.constexpr = cache_layout.tiling
        return _load_tiles(cache, index, cache_layout, TILING)


@triton.jit
def _load_blocks(cache, index, cache_layout: tl.constexpr, SCALING: tl.constexpr):
    valid, page, offset = locate(cache, index, cache_layout)
    in_use = valid[:, None]
    rows = cache.k_cache + locate_bytes(cache, page, offset, SCALING.token_bytes, cache_layout)[:, None]
    words = load_words(rows, tl.arange(0, SCALING.scale_offset // 4)[None, :], tl.int32, in_use, cache_layout.align)
    scales = tl.load(rows + SCALING.scale_offset + tl.arange(0, SCALING.blocks)[None, :], mask=in_use, other=0)
    # A placeholder: there is no rope, and Triton 3.6 cannot return None.
    return Packed(words, scales, scales, valid)


@triton.jit
def _load_tiles(cache, index, cache_layout: tl.constexpr, TILING: tl.constexpr):
    LATENT: tl.constexpr = TILING.tile * TILING.tiles
    valid, page, offset = locate(cache, index, cache_layout)
    in_use = valid[:, None]
    rows = cache.k_cache + locate_bytes(cache, page, offset, TILING.row_bytes, cache_layout)[:, None]
    word = tl.arange(0, _WORDS)[None, :]
    rope_number = tl.arange(0, _ROPE_DIM)[None, :]
    scale_number = tl.arange(0, TILING.padded_tiles)[None, :]
    if TILING.e8m0:
        words = load_words(rows, word, tl.int32, in_use & (word < LATENT // 4), cache_layout.align)
        rope = load_words(rows + TILING.rope_offset, rope_number, tl.uint16, in_use, cache_layout.align)
        scale_rows = cache.k_cache + locate_scale_bytes(cache, page, offset, TILING, cache_layout)[:, None]
        scales = tl.load(scale_rows + scale_number, mask=in_use & (scale_number < TILING.tiles), other=0)
    else:
        words = load_words(rows, word, tl.int32, in_use, cache_layout.align)
        if TILING.rope_offset < TILING.row_bytes:
            rope = load_words(rows + TILING.rope_offset, rope_number, tl.uint16, in_use, cache_layout.align)
        bits = load_words(rows + LATENT, scale_number, tl.int32, in_use, cache_layout.align)
        scales = bits.to(tl.float32, bitcast=True)
        if TILING.rope_offset == TILING.row_bytes:
            rope = scales
    return Packed(words, scales, rope, valid)


@triton.jit
def unpack(packed, dtype: tl.constexpr, cache_layout: tl.constexpr, step: tl.constexpr):
    """Dequantize tokens to ``dtype``: 512 latent elements and, for ``v32``, 64 rope elements."""
    if cache_layout.scaling is not None:
        return _unpack_blocks(packed, dtype, cache_layout.scaling.fp4, step)
    else:
        TILING: tl.constexpr = cache_layout.tiling
        return _unpack_tiles(packed, dtype, TILING.e8m0, TILING.rope_offset < TILING.row_bytes, step)


@triton.jit
def _unpack_blocks(packed, dtype: tl.constexpr, FP4: tl.constexpr, step: tl.constexpr):
    """Exact in bf16: the significands of an element and its scale have at most 4 + 1 bits (power-of-two scale) or 2 + 4
    bits (e2m1 with an e4m3 scale)."""
    BLOCK_N: tl.constexpr = packed.words.shape[0]
    BLOCKS: tl.constexpr = packed.scales.shape[1]
    if FP4:
        bits = _e2m1_to_bf16_bits(packed.words)
        factors = e4m3_to_float(packed.scales, False)
    else:
        bits = _e4m3_to_bf16_bits(packed.words)
        factors = e8m0_to_float(packed.scales)
    POWER: tl.constexpr = _TWO_126 if FP4 else _TWO_120
    bits = tl.reshape(bits, [BLOCK_N, BLOCKS, 4 * _WORDS // BLOCKS]).to(tl.bfloat16, bitcast=True)
    elements = to_float32(bits) * POWER if INTERPRETED else bits * POWER
    factors = tl.broadcast_to(factors.to(elements.dtype)[:, :, None], elements.shape)
    latent = tl.reshape(elements * factors, [BLOCK_N, 4 * _WORDS])
    latent = to_float32(from_float32(latent, tl.bfloat16)) if INTERPRETED else latent.to(dtype)
    latent = _opaque(latent, step)
    return RowTile(latent, latent)


@triton.jit
def _opaque(latent, step: tl.constexpr):
    """An opaque move. Without it, Triton converts the elements once for each of the two MMAs."""
    if step.ptx and not step.warpgroups:
        latent = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [latent], dtype=latent.dtype, is_pure=False, pack=2
        )
    return latent


@triton.jit
def _unpack_tiles(packed, dtype: tl.constexpr, E8M0: tl.constexpr, HAS_ROPE: tl.constexpr, step: tl.constexpr):
    """512 latent elements and 64 rope elements (HAS_ROPE), which in ``model1`` are the last of the latent ones.

    Elements are rounded to bf16 once. They are computed in bf16, with half the instructions of float32: the scale is
    split in its nearest bf16 (high) and a remainder, whose product's rounding error is negligible.
    """
    BLOCK_N: tl.constexpr = packed.words.shape[0]
    TILES: tl.constexpr = packed.scales.shape[1]
    bits = _e4m3_to_bf16_bits(packed.words)
    bits = tl.reshape(bits, [BLOCK_N, TILES, 4 * _WORDS // TILES]).to(tl.bfloat16, bitcast=True)
    elements = to_float32(bits) * _TWO_120 if INTERPRETED else bits * _TWO_120
    if HAS_ROPE:
        rope = packed.rope.to(tl.bfloat16, bitcast=True)
        if INTERPRETED:
            rope = to_float32(rope)
    if E8M0:
        high = e8m0_to_float(packed.scales).to(elements.dtype)
        # The last tile's elements and scale are still 0.
        in_rope = (tl.arange(0, TILES) == TILES - 1).to(rope.dtype)
        rest = rope[:, None, :] * in_rope[None, :, None]
    else:
        high = from_float32(packed.scales, tl.bfloat16)
        low = packed.scales - to_float32(high)
        high = high.to(elements.dtype)
        rest = elements * low.to(elements.dtype)[:, :, None]
    latent = tl.fma(elements, tl.broadcast_to(high[:, :, None], elements.shape), rest)
    latent = tl.reshape(latent, [BLOCK_N, 4 * _WORDS])
    latent = to_float32(from_float32(latent, tl.bfloat16)) if INTERPRETED else latent.to(dtype)
    latent = _opaque(latent, step)
    if not HAS_ROPE:
        return RowTile(latent, latent)
    else:
        return RowTile(latent, rope if INTERPRETED else rope.to(dtype))


@triton.jit
def _e4m3_to_bf16_bits(words):
    """The bits, int16 [tokens, 512], of bf16 values that are 2^-120 times the e4m3 values; subnormals are exact.

    The sign, the four exponent bits and the three mantissa bits are shifted to their positions in bf16, for two of a
    word's four elements at once.
    """
    even = ((words << 8) & -0x7FFF8000) | ((words << 4) & 0x07F007F0)
    odd = (words & -0x7FFF8000) | ((words >> 4) & 0x07F007F0)
    # If the seven bits are all ones (e4m3's NaN), the remaining exponent bits of bf16 are set too.
    even += ((even + 0x00100010) & 0x08000800) * 15
    odd += ((odd + 0x00100010) & 0x08000800) * 15
    first = tl.join(even.to(tl.int16), (even >> 16).to(tl.int16))  # [tokens, 128, 2]: elements 0 and 2 of a word
    second = tl.join(odd.to(tl.int16), (odd >> 16).to(tl.int16))  # elements 1 and 3
    return tl.reshape(tl.join(first, second), [words.shape[0], 4 * _WORDS])


@triton.jit
def _e2m1_to_bf16_bits(words):
    """The bits, int16 [tokens, 512], of bf16 values that are 2^-126 times the e2m1 values; the subnormal 0.5 is exact.

    The sign and the three other bits are shifted to their positions in bf16, for elements k and k + 4 of a word's eight
    at once.
    """
    zero = ((words << 12) & -0x7FFF8000) | ((words << 6) & 0x01C001C0)
    one = ((words << 8) & -0x7FFF8000) | ((words << 2) & 0x01C001C0)
    two = ((words << 4) & -0x7FFF8000) | ((words >> 2) & 0x01C001C0)
    three = (words & -0x7FFF8000) | ((words >> 6) & 0x01C001C0)
    # [tokens, 64, 2, 2]: elements 0, 2, 4, 6 of a word, and 1, 3, 5, 7.
    even = tl.join(_halves(zero), _halves(two))
    odd = tl.join(_halves(one), _halves(three))
    return tl.reshape(tl.join(even, odd), [words.shape[0], 8 * words.shape[1]])


@triton.jit
def _halves(pairs):
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
