"""e4m3 numbers to bf16, with their scales, by integer operations and bf16x2 products.

e4m3's bits, moved to where bf16 has sign, exponent and mantissa, are 2^-120 of the number, subnormals included. A
product with 2^120 makes them the number, exactly; another one, with the scale in bf16, rounds once. One product with
2^120 · scale would do for scales below 2^8.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LARGEST_BF16 = gl.constexpr(3.3895313892515355e38)
_NAN_E8M0 = gl.constexpr(255)

# A word of four numbers to two pairs: first the upper bytes of all four, then the lower ones.
_WIDEN = gl.constexpr(
    """{
    .reg .b32 upper, lower, two_120;
    mov.b32 two_120, 0x7B807B80;
    shr.u32 upper, $2, 4;
    and.b32 upper, upper, 0x07070707;
    lop3.b32 upper, $2, 0x80808080, upper, 0xEA;
    shl.b32 lower, $2, 4;
    and.b32 lower, lower, 0xF0F0F0F0;
    prmt.b32 $0, lower, upper, 0x5140;
    prmt.b32 $1, lower, upper, 0x7362;
    mul.rn.bf16x2 $0, $0, two_120;
    mul.rn.bf16x2 $1, $1, two_120;
    mul.rn.bf16x2 $0, $0, $3;
    mul.rn.bf16x2 $1, $1, $3;
    }"""
)


@gluon.jit
def factor_of_float(scale):
    """float32 scales (v32's) as pairs of bf16."""
    # Rounding must not make a finite scale infinite. NaN stays NaN.
    bounded = gl.where(scale > _LARGEST_BF16, _LARGEST_BF16, scale)
    bounded = gl.where(bounded < -_LARGEST_BF16, -_LARGEST_BF16, bounded)
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [bounded], gl.int32, is_pure=True, pack=1)


@gluon.jit
def factor_of_exponent(exponent, valid):
    """E8M0 scales (model1's), as int32, the same; 0 where not valid."""
    bits = gl.where(exponent == 0, 0x0040, exponent << 7)
    bits = gl.where(exponent == _NAN_E8M0, 0x7FC0, bits)
    return gl.where(valid, bits | (bits << 16), 0)


@gluon.jit
def widened(words, factor):
    """Numbers of ``words`` [tokens, groups, n], four e4m3 each, times ``factor`` [tokens, groups], a pair of bf16.

    Returns pairs of bf16 [tokens, groups · n · 2].
    """
    _, factor = gl.broadcast(words, factor[:, :, None])
    low, high = gl.inline_asm_elementwise(
        _WIDEN, "=&r,=&r,r,r", [words, factor], (gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([words.shape[0], words.shape[1] * words.shape[2] * 2])
