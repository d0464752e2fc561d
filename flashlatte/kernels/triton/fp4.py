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
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x == x, code | sign, 0)
