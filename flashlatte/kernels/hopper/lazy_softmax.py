"""A running softmax whose output is rescaled only when it must be, for Gluon kernels on Hopper.

Weights are relative to a reference that follows the running maximum only where they would grow beyond 2^HEADROOM.
Their precision does not depend on it, and rescaling the output costs as much as the rest of the softmax.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HEADROOM = gl.constexpr(8.0)


@gluon.constexpr_function
def _rescale_asm(numbers):
    # A thread holds in turn two numbers of its first row and two of its second. Operands: the numbers, the same again,
    # and the factor of each.
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
    return ",".join(["=f"] * numbers + [str(i) for i in range(numbers)] + ["f"] * numbers)


@gluon.jit
def rescale(output, factor):
    """``output`` [64, columns] of four warps, in the layout of a WGMMA, times ``factor`` [64, 1] of the same layout.

    Warps whose rows all have factor 1 do nothing.
    """
    NUMBERS: gl.constexpr = output.shape[0] * output.shape[1] // 128
    return gl.inline_asm_elementwise(
        _rescale_asm(NUMBERS),
        _rescale_constraints(NUMBERS),
        [output, factor],
        gl.float32,
        is_pure=True,
        pack=NUMBERS,
    )
