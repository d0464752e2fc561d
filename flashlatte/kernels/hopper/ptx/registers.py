"""Arithmetic on the registers of a thread, and values that are opaque to the compiler."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def in_place_constraints(TYPE, elements):
    # Constraints of results that are tied to operands.
    return ",".join([f"={TYPE}"] * elements + [str(i) for i in range(elements)])


@gluon.jit
def exp2(x):
    """2^x by one instruction, with subnormal arguments and results flushed to zero. ``gl.exp2`` takes three more
    instructions an element for subnormal results."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def opaque(x):
    """The same 32-bit value, opaque to the compiler.

    There are three uses. Triton 3.6 and 3.7 ignore that a loop-carried count bounds an inner loop, and use its first
    value (triton-lang/triton#9036). The compiler hoists whatever depends on row indices alone out of the main loop, and
    keeps it in registers. And it recomputes whatever depends on the program id in each partition.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def materialize(tile):
    """The same WGMMA result [64, columns], computed before any volatile code that follows."""
    ELEMENTS: gl.constexpr = tile.shape[0] * tile.shape[1] // 128
    return gl.inline_asm_elementwise(
        "", in_place_constraints("f", ELEMENTS), [tile], gl.float32, is_pure=False, pack=ELEMENTS
    )


@gluon.constexpr_function
def _loaded_asm(count, width):
    # Operands: 0 to count - 1 the words, tied to count to 2 count - 1. One word of each load is enough. The grid has
    # one axis, so z is 0 and the branch is never taken; loads do not move across it.
    gather = [f"or.b32 t, t, ${i};" for i in range(0, count, width if count >= 8 else 1)]
    begin = ["{ .reg .b32 t, z; .reg .pred p;", "mov.u32 z, %ctaid.y;", "mov.b32 t, 0;"]
    return " ".join([*begin, *gather, "and.b32 t, t, z;", "setp.ne.u32 p, t, 0;", "@p trap; }"])


@gluon.constexpr_function
def _words_each(TENSORS):
    return (gl.int32,) * TENSORS


@gluon.jit
def wait_loads(tensors, PACK: gl.constexpr, WIDTH: gl.constexpr = 4):
    """The same tuple of words, PACK per thread, after their loads of WIDTH words each have completed.

    ptxas has six scoreboards for pending loads and assigns several loads to one. Without this, the first use of a word
    would also wait for loads that were issued just before. Assumes a grid with one axis.
    """
    COUNT: gl.constexpr = len(tensors) * PACK
    return gl.inline_asm_elementwise(
        _loaded_asm(COUNT, WIDTH),
        in_place_constraints("r", COUNT),
        tensors,
        _words_each(len(tensors)),
        is_pure=False,
        pack=PACK,
    )


@gluon.constexpr_function
def _rescale_asm(elements):
    # Operands: the elements, tied to as many more, and the factor of each.
    factor = 2 * elements
    multiply = [f"mul.f32 ${i}, ${i}, ${factor + (i & 2)};" for i in range(elements)]
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
def _rescale_constraints(elements):
    return ",".join([in_place_constraints("f", elements)] + ["f"] * elements)


@gluon.jit
def rescale(tile, factor):
    """``tile`` [64, columns], a WGMMA result in four warps, times ``factor`` [64, 1]. A warp skips the product if all
    its factors are 1.

    It is a branch, which ptxas does not move across a barrier as it does arithmetic.
    """
    ELEMENTS: gl.constexpr = tile.shape[0] * tile.shape[1] // 128
    return gl.inline_asm_elementwise(
        _rescale_asm(ELEMENTS), _rescale_constraints(ELEMENTS), [tile, factor], gl.float32, is_pure=True, pack=ELEMENTS
    )


@gluon.constexpr_function
def _mask_asm(elements):
    # Operands: the scores, tied to as many more, and for each score the first visible and the first key after the
    # visible ones of its row, relative to the thread's first column.
    begin, end = 2 * elements, 3 * elements
    mask = []
    for i in range(elements):
        column = (i & 1) + (i >> 2) * 8
        row = i & 2
        mask += [
            f"setp.le.s32 seen, ${begin + row}, {column};",
            f"setp.gt.and.s32 seen, ${end + row}, {column}, seen;",
            f"selp.f32 ${i}, ${i}, 0fFF800000, seen;",
        ]
    return " ".join(["{ .reg .pred seen;", *mask, "}"])


@gluon.constexpr_function
def _mask_constraints(elements):
    return ",".join([in_place_constraints("f", elements)] + ["r"] * (2 * elements))


@gluon.jit
def mask_columns(scores, begin, end):
    """``scores`` [64, columns] of a WGMMA, with -inf in columns outside of the row's range. ``begin`` and ``end`` [64,
    columns] are the bounds of the range minus the index of the element's column.

    In PTX the columns are constants; the compiler would keep them in registers, even outside of the branch that masks.
    """
    ELEMENTS: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    return gl.inline_asm_elementwise(
        _mask_asm(ELEMENTS), _mask_constraints(ELEMENTS), [scores, begin, end], gl.float32, is_pure=True, pack=ELEMENTS
    )


@gluon.constexpr_function
def _mask_eights_asm():
    # Operands: 0 to 63 the scores, tied to 64 to 127; from 128 on copies of the word. A thread holds two columns of
    # each eight in two rows.
    mask = []
    for eight in range(16):
        mask.append(f"and.b32 bit, $128, {1 << eight}; setp.eq.s32 there, bit, 0;")
        mask += [f"selp.f32 ${i}, ${i}, 0fFF800000, there;" for i in range(4 * eight, 4 * eight + 4)]
    return " ".join(["{ .reg .pred there; .reg .b32 bit;", *mask, "}"])


@gluon.constexpr_function
def _mask_eights_constraints():
    return ",".join([in_place_constraints("f", 64)] + ["r"] * 64)


@gluon.jit
def mask_eights(scores, bits):
    """``scores`` [64, 128] of a WGMMA, with -inf in columns 8 i to 8 i + 7 if bit i of ``bits`` is set. ``bits`` [64,
    128] holds the same value everywhere."""
    return gl.inline_asm_elementwise(
        _mask_eights_asm(), _mask_eights_constraints(), [scores, bits], gl.float32, is_pure=True, pack=64
    )


@gluon.jit
def round_here(tile, DTYPE: gl.constexpr):
    """Round float32 to bf16 or fp16 at this point of the program and not later."""
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
    """bf16 or fp16 ``halves`` times float32 ``floats``, rounded to the type of ``halves``, at this point of the
    program. The compiler cannot cast ``halves`` earlier, while they are also an operand in registers."""
    return gl.inline_asm_elementwise(
        _product_asm(halves.dtype), "=r,r,f,f", [halves, floats], halves.dtype, is_pure=False, pack=2
    )
