"""Arithmetic on what a thread holds, and what the compiler may not know of it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def in_place(TYPE, numbers):
    # Constraints of results that are operands, too.
    return ",".join([f"={TYPE}"] * numbers + [str(i) for i in range(numbers)])


@gluon.jit
def opaque(x):
    """The same 32-bit number, about which the compiler knows nothing.

    That helps in three places. Triton 3.6 and 3.7 overlook that a loop-carried count bounds an inner loop, and keep
    its first value (triton-lang/triton#9036). What follows from row numbers alone is worked out before the main loop,
    and kept in registers through it. And what follows from the CTA's number each partition works out anew.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def computed_here(tile):
    """The same tile [64, columns] of a WGMMA's result, computed before any volatile text that follows."""
    NUMBERS: gl.constexpr = tile.shape[0] * tile.shape[1] // 128
    return gl.inline_asm_elementwise("", in_place("f", NUMBERS), [tile], gl.float32, is_pure=False, pack=NUMBERS)


@gluon.constexpr_function
def _loaded_asm(count):
    # Operands: 0 to count - 1 the words, also count to 2 count - 1. One of each 16 bytes that were loaded will do. The
    # grid has one axis: z is 0, and the branch, over which no load moves, never taken.
    gather = [f"or.b32 t, t, ${i};" for i in range(0, count, 4 if count >= 8 else 1)]
    begin = ["{ .reg .b32 t, z; .reg .pred p;", "mov.u32 z, %ctaid.y;", "mov.b32 t, 0;"]
    return " ".join([*begin, *gather, "and.b32 t, t, z;", "setp.ne.u32 p, t, 0;", "@p trap; }"])


@gluon.constexpr_function
def _words_each(TENSORS):
    return (gl.int32,) * TENSORS


@gluon.jit
def loaded(tensors, PACK: gl.constexpr):
    """A tuple of words, PACK each of a thread, once they have come from memory.

    ptxas has six scoreboards to wait for loads with, and gives one to several loads. The first use of a word would then
    wait for words, too, that have been asked for only just before. Assumes a grid with one axis.
    """
    COUNT: gl.constexpr = len(tensors) * PACK
    return gl.inline_asm_elementwise(
        _loaded_asm(COUNT), in_place("r", COUNT), tensors, _words_each(len(tensors)), is_pure=False, pack=PACK
    )


@gluon.constexpr_function
def _rescale_asm(numbers):
    # Operands: the numbers, the same again, and the factor of each.
    factor = 2 * numbers
    multiply = [f"mul.f32 ${i}, ${i}, ${factor + (i & 2)};" for i in range(numbers)]
    return " ".join(
        [
            "{ .reg .pred any, second;",
            f"setp.neu.f32 any, ${factor}, 0f3F800000;",
            f"setp.neu.f32 second, ${factor + 2}, 0f3F800000;",
            "or.pred any, any, second;",
            "vote.sync.any.pred any, any, 0xffffffff;",
            "@!any bra.uni DONE;",
            *multiply,
            "DONE: }",
        ]
    )


@gluon.constexpr_function
def _rescale_constraints(numbers):
    return ",".join([in_place("f", numbers)] + ["f"] * numbers)


@gluon.jit
def rescale(tile, factor):
    """``tile`` [64, columns], a WGMMA's result of four warps, times ``factor`` [64, 1]; nothing where all factors are
    1.

    A branch, which ptxas does not move over a barrier as it does arithmetic.
    """
    NUMBERS: gl.constexpr = tile.shape[0] * tile.shape[1] // 128
    return gl.inline_asm_elementwise(
        _rescale_asm(NUMBERS), _rescale_constraints(NUMBERS), [tile, factor], gl.float32, is_pure=True, pack=NUMBERS
    )


@gluon.constexpr_function
def _mask_asm(numbers):
    # Operands: the scores, the same again, and of each how far behind the thread's first column the row's first key
    # that counts is, and the first one that does not count any more.
    begin, end = 2 * numbers, 3 * numbers
    mask = []
    for i in range(numbers):
        column = (i & 1) + (i >> 2) * 8
        row = i & 2
        mask += [
            f"setp.le.s32 seen, ${begin + row}, {column};",
            f"setp.gt.and.s32 seen, ${end + row}, {column}, seen;",
            f"selp.f32 ${i}, ${i}, 0fFF800000, seen;",
        ]
    return " ".join(["{ .reg .pred seen;", *mask, "}"])


@gluon.constexpr_function
def _mask_constraints(numbers):
    return ",".join([in_place("f", numbers)] + ["r"] * (2 * numbers))


@gluon.jit
def mask_columns(scores, begin, end):
    """``scores`` [64, columns] of a WGMMA, -inf where a column c is not in ``begin + c0`` <= c < ``end + c0``, with c0
    the thread's first column: ``begin`` and ``end`` [64, columns] come with the number of their column subtracted.

    Columns are constants here; the compiler would keep them in registers, also outside of the branch that masks.
    """
    NUMBERS: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    return gl.inline_asm_elementwise(
        _mask_asm(NUMBERS), _mask_constraints(NUMBERS), [scores, begin, end], gl.float32, is_pure=True, pack=NUMBERS
    )


@gluon.constexpr_function
def _mask_eights_asm():
    # Operands: 0 to 63 the scores, also 64 to 127; 128 the word, as are those after it. A thread has two columns of
    # each eight in two rows.
    mask = []
    for eight in range(16):
        mask.append(f"and.b32 bit, $128, {1 << eight}; setp.eq.s32 there, bit, 0;")
        mask += [f"selp.f32 ${i}, ${i}, 0fFF800000, there;" for i in range(4 * eight, 4 * eight + 4)]
    return " ".join(["{ .reg .pred there; .reg .b32 bit;", *mask, "}"])


@gluon.constexpr_function
def _mask_eights_constraints():
    return ",".join([in_place("f", 64)] + ["r"] * 64)


@gluon.jit
def mask_eights(scores, bits):
    """``scores`` [64, 128] of a WGMMA, -inf in columns 8 i to 8 i + 7 where bit i is set in ``bits`` [64, 128], which
    is one number everywhere."""
    return gl.inline_asm_elementwise(
        _mask_eights_asm(), _mask_eights_constraints(), [scores, bits], gl.float32, is_pure=True, pack=64
    )


@gluon.jit
def round_here(tile, DTYPE: gl.constexpr):
    """float32 numbers in bf16 or fp16, rounded where this stands and not later."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [tile], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [tile], gl.float16, is_pure=False, pack=2
        )


@gluon.constexpr_function
def _product_asm(dtype):
    if dtype == gl.bfloat16:
        return """
{
    .reg .b32 x0, x1;
    .reg .f32 y0, y1;
    shl.b32 x0, $1, 16;
    and.b32 x1, $1, 0xffff0000;
    mul.f32 y0, x0, $2;
    mul.f32 y1, x1, $3;
    cvt.rn.bf16x2.f32 $0, y1, y0;
}
"""
    return """
{
    .reg .b16 x0, x1;
    .reg .f32 y0, y1;
    mov.b32 {x0, x1}, $1;
    cvt.f32.f16 y0, x0;
    cvt.f32.f16 y1, x1;
    mul.f32 y0, y0, $2;
    mul.f32 y1, y1, $3;
    cvt.rn.f16x2.f32 $0, y1, y0;
}
"""


@gluon.jit
def product_here(halves, floats):
    """bf16 or fp16 ``halves`` times float32 ``floats``, rounded to the halves' type, where this stands: ``halves`` are
    not cast ahead, while they are also an operand in registers."""
    return gl.inline_asm_elementwise(
        _product_asm(halves.dtype), "=r,r,f,f", [halves, floats], halves.dtype, is_pure=False, pack=2
    )
