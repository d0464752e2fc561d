"""Conversion between float32 and e2m1 codes with scales, for Triton kernels; bitwise equal to ``kv_cache.fp4``."""

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import float_to_e4m3


@triton.jit
def to_mxfp4(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Quantize float32 x [ROWS, D] in groups of 32 to bytes [ROWS, D // 2] of two codes, and E8M0 exponents [ROWS, D //
    32].

    A group with a non-finite value gets the exponent 255 (NaN) and codes 0.
    """
    low, high = tl.split(tl.reshape(x, [ROWS, D // 32, 16, 2]))  # [ROWS, D // 32, 16]
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    signs = ((low >> 28) & 8) | ((high >> 24) & 0x80)
    low, high = low & 0x7FFFFFFF, high & 0x7FFFFFFF
    amax = tl.max(tl.maximum(low, high), axis=2)
    # Of amax = m · 2^e, amax / 6 is (m / 1.5) · 2^(e - 2): a mantissa above 1.5 carries into the exponent.
    exponents = tl.maximum(((amax + 0x3FFFFF) >> 23) - 2, 1)
    finite = amax < 0x7F800000
    # 2^(127 - exponent). Non-finite groups are arbitrary here, and zeroed below.
    reciprocals = ((254 - exponents) << 23).to(tl.float32, bitcast=True)[:, :, None]
    low = _magnitude_code(low.to(tl.float32, bitcast=True), reciprocals)
    high = _magnitude_code(high.to(tl.float32, bitcast=True), reciprocals)
    # The conversion to bytes drops the bits above a code. An AND mask fuses with the OR of the signs into one
    # instruction; a select would be one more.
    codes = ((low + (high << 4)) | signs) & ((amax - 0x7F800000) >> 31)[:, :, None]
    return tl.reshape(codes.to(tl.uint8), [ROWS, D // 2]), tl.where(finite, exponents, 255).to(tl.uint8)


@triton.jit
def _magnitude_code(magnitude, reciprocal):
    """Codes 0 to 7 of y = magnitude · reciprocal <= 6, where ``reciprocal`` is a power of two: round to nearest even.

    The code is in the low byte of an int32; the upper bytes are arbitrary.
    """
    # Codes are 2y up to 2, y + 2 up to 4 and y / 2 + 4 above: the minimum of the three. The last bit of floats from
    # 2^23 on has the value 1, so each sum rounds once.
    code = tl.fma(magnitude, reciprocal * 2.0, 8388608.0)
    code = tl.minimum(code, tl.fma(magnitude, reciprocal, 8388610.0))
    code = tl.minimum(code, tl.fma(magnitude, reciprocal * 0.5, 8388612.0))
    return code.to(tl.int32, bitcast=True)


@triton.jit
def nvfp4_scales(low, high, ROUNDS_UP: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 scales, as bytes [tokens, blocks], of blocks whose values are given as two halves [tokens, blocks, 8]."""
    low = tl.max(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    amax = tl.maximum(low, tl.max(high.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2))
    exact = tl.div_rn(amax.to(tl.float32, bitcast=True), 6.0)
    exact = tl.minimum(tl.maximum(exact, 0.001953125), 448.0)
    if ROUNDS_UP:
        # In integers: ptxas of CUDA 12.8 reads registers that it has not written where an e4m3 byte is converted back
        # and incremented. Normal values lose 20 bits of their mantissa; subnormal ones are multiples of 2^-9.
        bits = exact.to(tl.int32, bitcast=True)
        normal = ((bits + 0xFFFFF) >> 20) - (120 << 3)
        codes = tl.where(bits < (121 << 23), tl.ceil(exact * 512.0).to(tl.int32), normal)
    else:
        codes = float_to_e4m3(exact, NATIVE).to(tl.int32)
    return tl.where(amax < 0x7F800000, codes, 0x7F).to(tl.uint8)


@triton.jit
def e2m1_code(x):
    """Codes 0 to 15 (int32) of float32 x: round to nearest even, saturate at 6; NaN gives 0."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Exponents are rebased from 127 to 1; adding half an ulp, minus one if even, rounds to nearest even.
    normal = (magnitude + ((bits >> 22) & 1) + (0x1FFFFF - (126 << 23))) >> 22
    # The last bit of floats from 2^22 on has the value 1/2, the smallest step: the addition rounds.
    subnormal = (tl.abs(x) + 4194304.0).to(tl.int32, bitcast=True) & 3
    code = tl.where(magnitude < 0x3F800000, subnormal, tl.minimum(normal, 7))
    return tl.where(x == x, code | ((bits >> 28) & 8), 0)


@triton.jit
def e2m1_to_float(codes):
    """The float32 values of codes 0 to 15 (int32), exactly."""
    # As float32 bits this is the value times 2^-126, including the subnormal 0.5.
    return (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
