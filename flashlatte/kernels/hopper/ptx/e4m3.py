"""Dequantization of e4m3 to bf16 with scales, by integer operations and bf16x2 products.

The bits of an e4m3 value, shifted to the positions of bf16's sign, exponent and mantissa, are the value times 2^-120,
also for subnormals. A product with 2^120 restores the value exactly; a second product, with the scale in bf16, rounds
once. (A single product with 2^120 · scale would only work for scales below 2^8.) NaN becomes ±480, so ``has_nan``
checks for it first, and tokens with NaN get NaN as their scale.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LARGEST_BF16 = gl.constexpr(3.3895313892515355e38)

# One word of four values to two pairs. Each value becomes the lower byte of 16 bits, with its sign replicated in the
# upper byte; after a shift by four bits, all but one copy of the sign are masked out.
_DEQUANTIZE = gl.constexpr(
    """{
    .reg .b32 two_120;
    mov.b32 two_120, 0x7B807B80;
    prmt.b32 $0, $2, 0, 0x9180;
    prmt.b32 $1, $2, 0, 0xB3A2;
    shl.b32 $0, $0, 4;
    shl.b32 $1, $1, 4;
    and.b32 $0, $0, 0x87F087F0;
    and.b32 $1, $1, 0x87F087F0;
    mul.rn.bf16x2 $0, $0, two_120;
    mul.rn.bf16x2 $1, $1, two_120;
    mul.rn.bf16x2 $0, $0, $3;
    mul.rn.bf16x2 $1, $1, $3;
    }"""
)


# By type, pairs of the factor that the shifted bits lack, and of NaN.
_EXACT = {"bf16": (0x7B807B80, 0x7FC07FC0), "fp16": (0x5C005C00, 0x7E007E00)}


@gluon.constexpr_function
def exact_factor(DTYPE):
    """The ``factor`` of ``expand`` that gives the values."""
    return _EXACT[str(DTYPE)][0]


@gluon.constexpr_function
def nan_factor(DTYPE):
    """The ``factor`` of ``expand`` that gives NaN."""
    return _EXACT[str(DTYPE)][1]


@gluon.constexpr_function
def _expand_asm(DTYPE):
    # As above; in fp16 the bits are shifted by three more and are the value times 2^-8.
    shift, mask, pair = (4, "0x87F087F0", "bf16x2") if str(DTYPE) == "bf16" else (7, "0xBF80BF80", "f16x2")
    moved = " ".join(
        f"prmt.b32 ${i}, $2, 0, {bytes_}; shl.b32 ${i}, ${i}, {shift}; and.b32 ${i}, ${i}, {mask}; "
        f"mul.rn.{pair} ${i}, ${i}, $3;"
        for i, bytes_ in enumerate(("0x9180", "0xB3A2"))
    )
    return f"{{ {moved} }}"


@gluon.jit
def expand(words, factor, DTYPE: gl.constexpr):
    """Cast ``words`` [tokens, n] of four e4m3 values exactly to pairs of bf16 or fp16 [tokens, 2n].

    ``factor`` [tokens]: ``exact_factor``, ``nan_factor``, or 0, which gives zeros for any words.
    """
    asm: gl.constexpr = _expand_asm(DTYPE)
    words, factor = gl.broadcast(words, factor[:, None])
    low, high = gl.inline_asm_elementwise(
        asm, "=&r,=&r,r,r", [words, factor], (gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([words.shape[0], words.shape[1] * 2])


@gluon.jit
def to_float16(words, keep):
    """Cast ``words`` [tokens, n] of four e4m3 values exactly to pairs of float16 [tokens, 2n]. ``keep`` [tokens]: -1,
    or 0 for zeros."""
    words, keep = gl.broadcast(words, keep[:, None])
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; .reg .b32 kept; and.b32 kept, $2, $3; mov.b32 {a, b}, kept; "
        "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=&r,=&r,r,r",
        [words, keep],
        (gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high).reshape([words.shape[0], words.shape[1] * 2])


@gluon.jit
def factor_of_float(scale):
    """float32 scales, rounded to pairs of bf16."""
    # Rounding must not make a finite scale infinite. NaN stays NaN.
    bounded = gl.where(scale > _LARGEST_BF16, _LARGEST_BF16, scale)
    bounded = gl.where(bounded < -_LARGEST_BF16, -_LARGEST_BF16, bounded)
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [bounded], gl.int32, is_pure=True, pack=1)


# The lower and the upper bytes of four exponents in bf16. Exponents of 0 (2^-127) and 255 (NaN), whose bits are all
# equal, set the upper bit of the mantissa.
_SPLIT = gl.constexpr(
    """{
    .reg .b32 t, differ;
    shr.u32 t, $2, 1;
    and.b32 $1, t, 0x7F7F7F7F;
    lop3.b32 differ, t, $2, 0x7F7F7F7F, 0x28;
    add.u32 differ, differ, 0x7F7F7F7F;
    shr.u32 differ, differ, 1;
    lop3.b32 differ, differ, 0x40404040, 0, 0x0C;
    shl.b32 t, $2, 7;
    lop3.b32 $0, t, 0x80808080, differ, 0xEA;
    }"""
)


@gluon.jit
def split_exponents(exponents):
    """Split words of four E8M0 scales into the operands of ``factor_of_exponent``."""
    return gl.inline_asm_elementwise(_SPLIT, "=&r,=&r,r", [exponents], (gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def factor_of_exponent(low, high, number):
    """Scale ``number`` of a word as a pair of bf16."""
    selector = number * 0x1111 + 0x4040
    selector, low = gl.broadcast(selector, low)
    selector, high = gl.broadcast(selector, high)
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], gl.int32, is_pure=True, pack=1
    )


# Scales that give NaN: float32, and four exponents.
NAN_FLOAT = gl.constexpr(0x7FC00000)
NAN_EXPONENTS = gl.constexpr(-1)
# Bit 7 of each value of a word.
_SIGNS = gl.constexpr(-0x7F7F7F80)


@gluon.constexpr_function
def _find_nan_asm(words, pack):
    # Operands: the results (the first one covers all words, the others are 0), then the words. Adding 1 to a value
    # flips its sign bit if all other bits are set, which is NaN. (A carry into the next value comes from a NaN, too.)
    code = ".reg .b32 sum, found; mov.b32 found, 0; "
    for word in range(pack, pack + words):
        code += f"add.u32 sum, ${word}, 0x01010101; lop3.b32 found, sum, ${word}, found, 0xBE; "
    code += "mov.b32 $0, found; " + " ".join(f"mov.b32 ${result}, 0;" for result in range(1, pack))
    return f"{{ {code} }}"


@gluon.constexpr_function
def _find_nan_constraints(words, pack):
    return ",".join(["=&r"] * pack + ["r"] * words)


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def has_nan(words, PACK: gl.constexpr):
    """Which tokens have a NaN in any of the tensors ``words`` [tokens, n] of four e4m3 values per word.

    Each thread holds ``PACK`` words of a token in each tensor.
    """
    WORDS: gl.constexpr = PACK * len(words)
    asm: gl.constexpr = _find_nan_asm(WORDS, PACK)
    constraints: gl.constexpr = _find_nan_constraints(WORDS, PACK)
    found = gl.inline_asm_elementwise(asm, constraints, words, gl.int32, is_pure=True, pack=PACK)
    return (gl.reduce(found, 1, _or) & _SIGNS) != 0


@gluon.jit
def dequantize(words, factor):
    """Multiply the e4m3 values of ``words`` [tokens, groups, n], four per word, by ``factor`` [tokens, groups], a pair
    of equal bf16.

    Returns pairs of bf16 [tokens, groups · n · 2].
    """
    _, factor = gl.broadcast(words, factor[:, :, None])
    low, high = gl.inline_asm_elementwise(
        _DEQUANTIZE, "=&r,=&r,r,r", [words, factor], (gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([words.shape[0], words.shape[1] * words.shape[2] * 2])
