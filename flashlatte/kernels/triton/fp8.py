"""Conversions of e4m3, e5m2, int8, E8M0 and bf16 for Triton kernels, with bitwise equal results on every GPU and in the
interpreter.

``NATIVE``: the GPU converts e4m3 in hardware (``converts_e4m3``); the alternative integer arithmetic is bitwise equal.
The casts of Triton's interpreter are replaced: from float32 to bf16 it truncates, and from bf16 to float32 it is wrong
for subnormals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.runtime import machine
from flashlatte.runtime.triton_kernel import INTERPRETED


@machine.cached
def converts_e4m3(device: torch.device) -> bool:
    """Whether Triton casts between float32 and e4m3fn in hardware on ``device``."""
    if machine.device_type(device) != "cuda" or torch.version.hip is not None or machine.interpreting():
        return False
    return machine.compute_capability(device) >= (8, 9)


@triton.jit
def float_to_e4m3(x, NATIVE: tl.constexpr):
    """Convert float32 x to e4m3 bits (uint8): round to nearest even, saturate at 448; NaN stays NaN."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Exponents are rebased from 127 to 7; adding half an ulp, minus one if even, rounds to nearest even.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # The last bit of floats from 2^14 on has the value 2^-9, e4m3's smallest step: the addition rounds.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
        code = tl.where(magnitude < (121 << 23), subnormal, normal)
        code = tl.where(magnitude > 0x43E00000, 0x7E, code)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float_to_e5m2(x):
    """Convert float32 x to e5m2 bits (uint8): round to nearest even, saturate at 57344; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # See ``float_to_e4m3``: exponents are rebased from 127 to 15, and e5m2's smallest step is 2^-16.
    normal = ((magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21) - (112 << 2)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - (134 << 23)
    code = tl.where(magnitude < (113 << 23), subnormal, normal)
    code = tl.where(magnitude > 0x47600000, 0x7B, code)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float_to_int8(x):
    """Convert float32 x to int8 bits (uint8): round to nearest even, saturate at 127 and -127; NaN becomes 0."""
    x = tl.where(x == x, x, 0.0)
    x = tl.where(x > 127.0, 127.0, tl.where(x < -127.0, -127.0, x))
    # 1.5 · 2^23: the last bit of the sum has the value 1, and its low byte is the int8 value.
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def e4m3_to_float(bits, NATIVE: tl.constexpr):
    """Convert e4m3 bits (uint8) to float32, exactly."""
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        word = bits.to(tl.int32)
        magnitude = word & 0x7F
        # As float32 bits this is the value times 2^-120, including subnormals.
        value = ((magnitude << 20) | ((word & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def e8m0_to_float(bits):
    """Convert E8M0 bits (uint8) to float32 2^(bits - 127); 255 is NaN."""
    word = bits.to(tl.int32)
    # 2^-127 is subnormal in float32.
    word = tl.where(word == 0, 0x00400000, tl.where(word == 255, 0x7FC00000, word << 23))
    return word.to(tl.float32, bitcast=True)


@triton.jit
def to_float32(x):
    """Convert bf16, fp16 or float32 x to float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def from_float32(x, dtype: tl.constexpr):
    """Convert float32 x to ``dtype`` (bf16, fp16 or float32), rounding to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FFF)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Convert x between bf16, fp16 and float32, rounding to nearest even."""
    if x.dtype != dtype:
        x = from_float32(to_float32(x), dtype)
    return x
