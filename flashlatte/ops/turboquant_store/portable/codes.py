"""Codes of numbers: nearest centroids of keys, steps of values."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
import struct

import triton
import triton.language as tl

from flashlatte.kv_cache.lloyd_max import midpoints

# 1 / (2 · 2.51) and 1 / (2 · 1.91), at which all midpoints lie within 7e-7 of a float32 whose last four bits are those
# of the code below it (``lane_table``), and what is added to it for 0 to be one of them.
_SLOPE = {4: float.fromhex("0x1.978f28p-3"), 3: float.fromhex("0x1.0c9374p-2")}
_CENTRE = {4: 0x3F000007, 3: 0x3F000003}
_LAST_LANE = 31


def _as_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _as_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


@functools.cache
def lane_table(bits: int) -> list[int]:
    """For each lane u the float32 bits of the midpoint, on the way from 0 to 1, that rounds to u / 31.

    The last four bits are those of the code below it: how many midpoints lie below. Lanes of no midpoint have 2.
    """
    table = [0] * (_LAST_LANE + 1)
    found = []
    for code, middle in enumerate(midpoints(bits)):
        exact = _as_bits(middle * _SLOPE[bits] + _as_float(_CENTRE[bits]))
        near = exact & ~15 | code
        found.append(min((near - 16, near, near + 16), key=lambda one: abs(one - exact)))
    at = {round(_as_float(one) * _LAST_LANE): one for one in found}
    below = 0
    for lane in range(_LAST_LANE + 1):
        table[lane] = at.get(lane, _as_bits(2.0) | below)
        below += lane in at
    return table


def _table_text(bits: int) -> str:
    """``lane_table`` into a register of the whole kernel."""
    lines = [".reg .b32 tq_codes, tq_lane; .reg .pred tq_is;", "mov.u32 tq_lane, %laneid;"]
    for lane, word in enumerate(lane_table(bits)):
        lines.append(f"setp.eq.u32 tq_is, tq_lane, {lane}; @tq_is mov.b32 tq_codes, 0x{word:08X};")
    return " ".join([*lines, "mov.b32 $0, 0;"])


def _code_text(bits: int) -> str:
    """The code $0 of the number $1 times $2, in units of 1 / (2 · slope): one look at another lane's midpoint."""
    return (
        "{.reg .f32 z, v; .reg .b32 t; .reg .pred p;"
        f"fma.rn.sat.f32 z, $1, $2, 0f{_CENTRE[bits]:08X};"
        # The last bits of 2^23 + v are v's.
        f"fma.rn.f32 v, z, 0f{_as_bits(_LAST_LANE):08X}, 0f4B000000;"
        "mov.b32 t, v; shfl.sync.idx.b32 t, tq_codes, t, 31, 0xFFFFFFFF;"
        "mov.b32 v, t; setp.ge.f32 p, z, v; and.b32 $0, t, 15; @p add.u32 $0, $0, 1;}"
    )


_TABLE_3, _TABLE_4 = tl.constexpr(_table_text(3)), tl.constexpr(_table_text(4))
_CODE_3, _CODE_4 = tl.constexpr(_code_text(3)), tl.constexpr(_code_text(4))
_SLOPE_3, _SLOPE_4 = tl.constexpr(_SLOPE[3]), tl.constexpr(_SLOPE[4])


@triton.jit
def keep_table(count, BITS: tl.constexpr):
    """Once in a kernel, before its first ``codes_by_lanes``. ``count`` is any int32."""
    TEXT: tl.constexpr = _TABLE_4 if BITS == 4 else _TABLE_3
    tl.inline_asm_elementwise(TEXT, "=r,r", [count], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def codes_by_lanes(x, factor, BITS: tl.constexpr):
    """int32 codes of normal numbers x · factor."""
    SLOPE: tl.constexpr = _SLOPE_4 if BITS == 4 else _SLOPE_3
    TEXT: tl.constexpr = _CODE_4 if BITS == 4 else _CODE_3
    slope = tl.broadcast_to(factor * SLOPE, x.shape)
    return tl.inline_asm_elementwise(TEXT, "=r,f,f", [x, slope], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def codes_of(x, MIDPOINTS: tl.constexpr):
    """int32 codes of normal numbers, by bisection. MIDPOINTS are the 3 or 7 above 0, rising."""
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
    # The code of -x has all bits turned over.
    return code ^ tl.where(x >= 0, 0, 2 * HALF - 1)


@triton.jit
def quotient(x, scale, INTERPRETED: tl.constexpr):
    """x / scale of float32 x [BLOCK_R, D] and scale [BLOCK_R, 1], rounded as a division is.

    By the scale's reciprocal, and what that leaves of x once more: two fused products for the eight instructions and
    a branch of a division. Triton's interpreter does not fuse them. (Markstein, 1990; where all bits of a scale are 1
    the last bit may differ, which moves no number over a half step.)
    """
    if INTERPRETED:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        reciprocal = tl.div_rn(1.0, scale)
        quotient = x * reciprocal
        return tl.fma(tl.fma(quotient, -scale, x), reciprocal, quotient)
