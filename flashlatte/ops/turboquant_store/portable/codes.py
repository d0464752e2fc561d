"""Quantization to codes: nearest centroids for keys, uniform steps for values."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.runtime.triton_kernel import INTERPRETED


@triton.jit
def codes_of(x, MIDPOINTS: tl.constexpr):
    """int32 codes of normally distributed values, by bisection. MIDPOINTS are the 3 or 7 positive ones, ascending."""
    HALF: tl.constexpr = len(MIDPOINTS) + 1
    size = tl.abs(x)
    upper = size >= MIDPOINTS[HALF // 2 - 1]
    code = tl.where(upper, HALF + HALF // 2, HALF)
    if HALF == 4:
        last = size >= tl.where(upper, MIDPOINTS[2], MIDPOINTS[0])
    else:
        second = size >= tl.where(upper, MIDPOINTS[5], MIDPOINTS[1])
        code += tl.where(second, 2, 0)
        above, below = tl.where(second, MIDPOINTS[6], MIDPOINTS[4]), tl.where(second, MIDPOINTS[2], MIDPOINTS[0])
        last = size >= tl.where(upper, above, below)
    code += tl.where(last, 1, 0)
    # The code of -x is the bitwise complement.
    return code ^ tl.where(x >= 0, 0, 2 * HALF - 1)


@triton.jit
def quotient(x, scale):
    """x / scale of float32 x [BLOCK_R, D] and scale [BLOCK_R, 1], correctly rounded.

    A multiplication by the reciprocal and one correction step: two FMAs instead of the eight instructions and a branch
    of a division. Triton's interpreter does not fuse them. (Markstein, 1990. If all mantissa bits of a scale are 1, the
    last bit may differ, which does not change any code.)
    """
    if INTERPRETED:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        reciprocal = tl.div_rn(1.0, scale)
        quotient = x * reciprocal
        return tl.fma(tl.fma(quotient, -scale, x), reciprocal, quotient)
