"""Selected cache tokens as tiles of keys.

A key is a latent part, which is its value too, and a rope part, which may be empty. In ``v32`` the latent part is
512 e4m3 numbers; in ``model1`` it is the whole row, 448 e4m3 numbers and 64 bf16 ones. Tokens that are not valid
read as zeros, whatever their bytes are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kv_cache.portable.addresses import load_words
from flashlatte.kv_cache.triton_fp8 import e8m0_to_float, narrow, widen
from flashlatte.triton_attention import load_rows

# Bytes of a token in its plane, and of what is in it; numbers that share a scale.
_V32_ROW = tl.constexpr(656)
_V32_SCALES = tl.constexpr(512)
_V32_ROPE = tl.constexpr(528)
_MODEL1_ROW = tl.constexpr(576)
_MODEL1_ROPE = tl.constexpr(448)
_MODEL1_SCALES = tl.constexpr(7)
_MODEL1_SCALE_BYTES = tl.constexpr(8)
_WORDS = tl.constexpr(128)
_ROPE_DIM = tl.constexpr(64)
_TWO_120 = tl.constexpr(1.329227995784916e36)


class Cache(NamedTuple):
    """A cache and the tokens of it that may be read.

    Attributes:
        k_cache: [pages, page_size, width]; bytes in the formats with scales.
        stride_page: in units of ALIGN bytes, or of ALIGN numbers in the formats without scales.
        stride_token: likewise; not used in the formats with scales.
        num_slots: the tokens; an index from there on is invalid. At most 2^31 for int32 indices.
    """

    k_cache: Any
    stride_page: Any
    stride_token: Any
    num_slots: Any


@triton.jit
def locate(cache, index, PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Which indices are valid, and their pages and offsets in them, those of a valid one where not.

    WIDE: valid indices may pass 2^32, which costs a 64-bit division.
    """
    # Clamped rather than selected by ``valid``: Triton's layout pass fails on that select for 64-bit indices.
    slot = tl.minimum(tl.maximum(index, 0), (cache.num_slots - 1).to(index.dtype))
    valid = slot == index
    slot = slot.to(tl.uint64 if WIDE else tl.uint32)
    page = slot // PAGE_SIZE
    return valid, page.to(tl.int64), (slot - page * PAGE_SIZE).to(tl.int64)


@triton.jit
def load_plain(
    cache,
    index,
    in_list,
    D: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Tokens of a cache without scales: latent [tokens, LATENT], rope [tokens, ROPE], and which are valid."""
    valid, page, offset = locate(cache, index, PAGE_SIZE, WIDE)
    valid = valid & in_list
    rows = (page * cache.stride_page + offset * cache.stride_token) * ALIGN
    latent = load_rows(cache.k_cache, rows, valid, 0, D_V, LATENT, INTERPRETED)
    rope = latent
    if ROPE > 0:
        rope = load_rows(cache.k_cache, rows, valid, D_V, D - D_V, ROPE, INTERPRETED)
    return latent, rope, valid


@triton.jit
def load_packed(cache, index, MODEL1: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr):
    """Tokens as they lie in a cache with scales, for ``unpack``.

    Returns:
        words: int32 [tokens, 128], four e4m3 numbers each; zeros beyond the 448 numbers of ``model1``.
        scales: float32 [tokens, 4] (``v32``), or E8M0 bytes [tokens, 8].
        rope: bf16 bits [tokens, 64].
        valid: which tokens are.
    """
    valid, page, offset = locate(cache, index, PAGE_SIZE, WIDE)
    in_use = valid[:, None]
    row_bytes: tl.constexpr = _MODEL1_ROW if MODEL1 else _V32_ROW
    page_start = page * cache.stride_page * ALIGN
    rows = cache.k_cache + (page_start + offset * row_bytes)[:, None]
    word = tl.arange(0, _WORDS)[None, :]
    rope_number = tl.arange(0, _ROPE_DIM)[None, :]
    if MODEL1:
        words = load_words(rows, word, tl.int32, in_use & (word < _MODEL1_ROPE // 4), ALIGN)
        rope = load_words(rows + _MODEL1_ROPE, rope_number, tl.uint16, in_use, ALIGN)
        scale_rows = cache.k_cache + (page_start + PAGE_SIZE * row_bytes + offset * _MODEL1_SCALE_BYTES)[:, None]
        scale_number = tl.arange(0, _MODEL1_SCALE_BYTES)[None, :]
        scales = tl.load(scale_rows + scale_number, mask=in_use & (scale_number < _MODEL1_SCALES), other=0)
    else:
        words = load_words(rows, word, tl.int32, in_use, ALIGN)
        rope = load_words(rows + _V32_ROPE, rope_number, tl.uint16, in_use, ALIGN)
        bits = load_words(rows + _V32_SCALES, tl.arange(0, 4)[None, :], tl.int32, in_use, ALIGN)
        scales = bits.to(tl.float32, bitcast=True)
    return words, scales, rope, valid


@triton.jit
def unpack(
    words, scales, rope, dtype: tl.constexpr, MODEL1: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr
):
    """(latent [tokens, 512], rope [tokens, 64]) in ``dtype``, as operands of a matrix product.

    A number is rounded to bf16 once. It is computed in bf16, where float32 would take twice the instructions: high is
    the scale's nearest bf16, and what the number times the rest of the scale is rounded by is too small to matter.
    """
    BLOCK_N: tl.constexpr = words.shape[0]
    TILES: tl.constexpr = scales.shape[1]
    bits = tl.reshape(_e4m3_to_bf16_bits(words), [BLOCK_N, TILES, 4 * _WORDS // TILES]).to(tl.bfloat16, bitcast=True)
    numbers = widen(bits, True) * _TWO_120 if INTERPRETED else bits * _TWO_120
    rope = rope.to(tl.bfloat16, bitcast=True)
    if INTERPRETED:
        rope = widen(rope, True)
    if MODEL1:
        high = e8m0_to_float(scales).to(rope.dtype)
        # The last tile's numbers and scale are 0 so far.
        in_rope = (tl.arange(0, TILES) == TILES - 1).to(rope.dtype)
        rest = rope[:, None, :] * in_rope[None, :, None]
    else:
        high = narrow(scales, tl.bfloat16, INTERPRETED)
        low = scales - widen(high, INTERPRETED)
        high = high.to(rope.dtype)
        rest = numbers * low.to(rope.dtype)[:, :, None]
    latent = tl.fma(numbers, tl.broadcast_to(high[:, :, None], numbers.shape), rest)
    latent = tl.reshape(latent, [BLOCK_N, 4 * _WORDS])
    if INTERPRETED:
        return widen(narrow(latent, tl.bfloat16, True), True), rope
    latent = latent.to(dtype)
    if PTX:
        # A move that Triton cannot see through. Else it converts the numbers once for each of the two products.
        latent = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [latent], dtype=latent.dtype, is_pure=False, pack=2
        )
    return latent, rope.to(dtype)


@triton.jit
def _e4m3_to_bf16_bits(words):
    """The bits, int16 [tokens, 512], of bf16 numbers that are 2^-120 of the e4m3 ones; subnormals are exact.

    A sign bit and the four bits of exponent and three of mantissa behind it only move to bf16's places, in two of a
    word's four numbers at once. NaN, S.1111.111, becomes ±480: who stores a NaN stores a NaN scale with it.
    """
    even = ((words << 8) & -0x7FFF8000) | ((words << 4) & 0x07F007F0)
    odd = (words & -0x7FFF8000) | ((words >> 4) & 0x07F007F0)
    first = tl.join(even.to(tl.int16), (even >> 16).to(tl.int16))  # [tokens, 128, 2]: numbers 0 and 2 of a word
    second = tl.join(odd.to(tl.int16), (odd >> 16).to(tl.int16))  # numbers 1 and 3
    return tl.reshape(tl.join(first, second), [words.shape[0], 4 * _WORDS])
