"""The scale of each row that is quantised to e4m3 as a whole."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_scales(x, smallest_amax, POWER_OF_TWO: tl.constexpr):
    """max(amax, smallest_amax) / 448 of each row of float32 x, or that rounded up; NaN of a row with a NaN."""
    # As integers, magnitudes keep their order and NaN is the largest: a float maximum would lose it.
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    scales = tl.div_rn(tl.where(amax < smallest_amax, smallest_amax, amax), 448.0)
    if POWER_OF_TWO:
        bits = scales.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scales = tl.where(bits < 0x7F800000, rounded, scales)
    return scales
