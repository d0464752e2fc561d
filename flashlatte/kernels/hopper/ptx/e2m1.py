"""Dequantization of e2m1 to bf16 with e4m3 scales, by integer operations and bf16x2 products.

The bits of an e2m1 value, shifted to the positions of bf16's sign, exponent and mantissa, are the value times 2^-126,
also for the subnormal 0.5. A product with 2^126 restores the value. The product with the scale is exact, too: the
significands have 2 and 4 bits. (A single product with 2^126 · scale would only work for scales below 4.) e2m1 has no
NaN, and the conversion of a scale keeps its NaN, so no value is searched for NaN.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _dequantize_asm():
    # One word of eight values to four pairs. Byte i holds a pair. Its even value, moved to the upper half of a byte by
    # a shift of the word, and its odd value become the lower bytes of 16 bits, with their signs replicated in the upper
    # bytes; after a shift by two bits, all but one copy of the sign are masked out.
    pairs = [
        f"prmt.b32 ${i}, even, $4, 0x{0xC480 + 0x1111 * i:X}; shl.b32 ${i}, ${i}, 2; "
        f"and.b32 ${i}, ${i}, 0x81C081C0; mul.rn.bf16x2 ${i}, ${i}, two_126; mul.rn.bf16x2 ${i}, ${i}, $5;"
        for i in range(4)
    ]
    begin = "{ .reg .b32 even, two_126; mov.b32 two_126, 0x7E807E80; shl.b32 even, $4, 4;"
    return " ".join([begin, *pairs, "}"])


@gluon.jit
def dequantize(words, factor):
    """Multiply the e2m1 values of ``words`` [tokens, groups, n], eight per word, by ``factor`` [tokens, groups], a pair
    of equal bf16.

    Returns pairs of bf16 [tokens, groups · n · 4].
    """
    ASM: gl.constexpr = _dequantize_asm()
    _, factor = gl.broadcast(words, factor[:, :, None])
    first, second, third, fourth = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r", [words, factor], (gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    pairs = gl.join(gl.join(first, third), gl.join(second, fourth))
    return pairs.reshape([words.shape[0], words.shape[1] * words.shape[2] * 4])


# The e4m3 byte that the selector takes from a word, twice, then in fp16, in float32, and as a pair of bf16: all exact.
_FACTOR = gl.constexpr(
    """{
    .reg .b32 two;
    .reg .b16 scale, same;
    .reg .f32 exact;
    prmt.b32 two, $1, 0, $2;
    mov.b32 {scale, same}, two;
    cvt.rn.f16x2.e4m3x2 two, scale;
    mov.b32 {scale, same}, two;
    cvt.f32.f16 exact, scale;
    cvt.rn.bf16x2.f32 $0, exact, exact;
    }"""
)


@gluon.jit
def factor_of_scale(words, number):
    """Scale ``number`` of each word of four e4m3 scales as a pair of bf16."""
    words, selector = gl.broadcast(words, number * 0x11)
    return gl.inline_asm_elementwise(_FACTOR, "=r,r,r", [words, selector], gl.int32, is_pure=True, pack=1)
