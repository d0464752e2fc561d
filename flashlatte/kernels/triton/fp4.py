"""e2m1 codes and their E8M0 scales from float32, for Triton kernels; ``kv_cache.fp4`` in bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mxfp4_scales(low, high):
    """E8M0 exponents and the reciprocals of the scales, of groups [tokens, groups, 16] of two halves each."""
    low = tl.max(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    amax = tl.maximum(low, tl.max(high.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2))
    # Of amax = m · 2^e, amax / 6 is (m / 1.5) · 2^(e - 2): a mantissa above 1.5 carries into the exponent.
    exponents = tl.maximum(((amax + 0x3FFFFF) >> 23) - 2, 1)
    finite = amax < 0x7F800000
    # 2^(127 - exponent): subnormal, and exact, only of an exponent of 254, which no amax / 6 has.
    reciprocals = ((254 - exponents) << 23).to(tl.float32, bitcast=True)
    return tl.where(finite, exponents, 255), tl.where(finite, reciprocals, float("nan"))


@triton.jit
def e2m1_code(x):
    """Codes 0 to 15, int32, of float32 x: nearest, the even code of two as near, saturating at 6; NaN gives 0."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Exponents are rebased from 127 to 1; adding half a unit, less one if even, rounds to nearest even.
    normal = (magnitude + ((bits >> 22) & 1) + (0x1FFFFF - (126 << 23))) >> 22
    # The last bit of floats from 2^22 on is worth 1/2, the smallest step: the addition rounds.
    subnormal = (tl.abs(x) + 4194304.0).to(tl.int32, bitcast=True) & 3
    code = tl.where(magnitude < 0x3F800000, subnormal, tl.minimum(normal, 7))
    return tl.where(x == x, code | ((bits >> 28) & 8), 0)
