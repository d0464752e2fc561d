"""Scales of rows that are quantized to e4m3, with one scale per row, per tile of a row, or for all rows."""

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.fp8_attention import SMALLEST_AMAX
from flashlatte.kv_cache.fp8 import E4M3_MAX

_LARGEST = tl.constexpr(E4M3_MAX)
_SMALLEST = tl.constexpr(SMALLEST_AMAX)


@triton.jit
def power_of_two_scale(amax):
    """The scale of ``fp8_attention``: the smallest power of two for which ``amax`` / scale is at most 448."""
    bits = (tl.maximum(amax, _SMALLEST) * (1.0 / _LARGEST)).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scale_rows(x, smallest_amax, POWER_OF_TWO: tl.constexpr):
    """Float32 x / scale, and the scale of each row: max(amax, smallest_amax) / 448, or that rounded up to a power of
    two.

    The scale of a row with a NaN is NaN. Bitwise equal to ``kv_cache.index_formats.quantize_rows``.
    """
    # As integers, magnitudes keep their order and NaN is the largest: a float maximum would lose it.
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    amax = tl.where(amax < smallest_amax, smallest_amax, amax)
    if POWER_OF_TWO:
        bits = amax.to(tl.int32, bitcast=True)
        # Of amax = m · 2^e, amax / 448 is (m / 1.75) · 2^(e - 8): a mantissa above 1.75 carries into the exponent.
        rounded = tl.maximum(((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23), 1 << 23)
        finite = bits < 0x7F800000
        scales = tl.where(finite, rounded.to(tl.float32, bitcast=True), amax)
        # The reciprocal of a power of two is exact, so the product equals the quotient: one division per element would
        # take longer than everything else.
        reciprocals = ((254 << 23) - rounded).to(tl.float32, bitcast=True)
        reciprocals = tl.where(finite, reciprocals, tl.where(bits == 0x7F800000, 0.0, amax))
        return x * reciprocals[:, None], scales
    else:
        scales = tl.div_rn(amax, 448.0)
        return tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape)), scales


@triton.jit
def quantize_tiles(x, POWER_OF_TWO: tl.constexpr):
    """Float32 x / scale, and the int32 bits of the scale of each tile (last axis); bitwise equal to
    ``kv_cache.fp8.quantize_tiles``."""
    # As integers, magnitudes keep their order and NaN is the largest: a float maximum would lose it.
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    float_amax = amax.to(tl.float32, bitcast=True)
    if POWER_OF_TWO:
        finite = amax < 0x7F800000
        # Of amax = m · 2^e, amax / 448 is (m / 1.75) · 2^(e - 8): a mantissa above 1.75 carries into the exponent.
        scales = tl.maximum(((amax + 0x1FFFFF) & 0x7F800000) - (8 << 23), (127 - 13) << 23)
        # For infinity and NaN, the sum gives the same result as the division.
        scales = tl.where(finite, scales, (float_amax + float_amax).to(tl.int32, bitcast=True))
        # The reciprocal of a power of two is exact, so the product equals the quotient.
        reciprocals = tl.where(finite, (254 << 23) - scales, tl.where(amax == 0x7F800000, 0, scales))
        values = x * reciprocals.to(tl.float32, bitcast=True)[:, :, None]
    else:
        scales = tl.maximum(tl.div_rn(float_amax, 448.0).to(tl.int32, bitcast=True), 1 << 23)
        divisors = scales.to(tl.float32, bitcast=True)
        values = tl.div_rn(x, tl.broadcast_to(divisors[:, :, None], x.shape))
    return values, scales
