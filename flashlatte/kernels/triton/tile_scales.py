"""The scale of each tile of a row that is quantised to e4m3 tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_tiles(x, POWER_OF_TWO: tl.constexpr):
    """Float32 x / scale and the scale's int32 bits of each last-axis tile; ``kv_cache.fp8.quantize_tiles`` in bits."""
    # As integers, magnitudes keep their order and NaN is the largest: a float maximum would lose it.
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    float_amax = amax.to(tl.float32, bitcast=True)
    if POWER_OF_TWO:
        finite = amax < 0x7F800000
        # Of amax = m · 2^e, amax / 448 is (m / 1.75) · 2^(e - 8): a mantissa above 1.75 carries into the exponent.
        scales = tl.maximum(((amax + 0x1FFFFF) & 0x7F800000) - (8 << 23), (127 - 13) << 23)
        # A sum makes of an infinity or NaN what the division would.
        scales = tl.where(finite, scales, (float_amax + float_amax).to(tl.int32, bitcast=True))
        # The reciprocal of a power of two is exact, so that the product is the quotient.
        reciprocals = tl.where(finite, (254 << 23) - scales, tl.where(amax == 0x7F800000, 0, scales))
        values = x * reciprocals.to(tl.float32, bitcast=True)[:, :, None]
    else:
        scales = tl.maximum(tl.div_rn(float_amax, 448.0).to(tl.int32, bitcast=True), 1 << 23)
        divisors = scales.to(tl.float32, bitcast=True)
        values = tl.div_rn(x, tl.broadcast_to(divisors[:, :, None], x.shape))
    return values, scales
