"""A running softmax whose output is rescaled only when it must be, for Gluon kernels on Hopper.

Weights are relative to a reference that follows the running maximum only where they would grow beyond 2^HEADROOM.
Their precision does not depend on it, and rescaling the output costs as much as the rest of the softmax.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HEADROOM = gl.constexpr(8.0)


@gluon.constexpr_function
def _rescale_asm():
    # A thread holds 128 numbers: in turn two of its first row and two of its second. Operands: 0 to 127 the numbers,
    # also 128 to 255; 256 to 383 the factor of each.
    multiply = [f"mul.f32 ${i}, ${i}, ${256 + (i & 2)};" for i in range(128)]
    return " ".join(
        [
            "{ .reg .pred any, second;",
            "setp.neu.f32 any, $256, 0f3F800000;",
            "setp.neu.f32 second, $258, 0f3F800000;",
            "or.pred any, any, second;",
            "vote.sync.any.pred any, any, 0xffffffff;",
            "@!any bra.uni DONE;",
            *multiply,
            "DONE: }",
        ]
    )


@gluon.constexpr_function
def _rescale_constraints():
    return ",".join(["=f"] * 128 + [str(i) for i in range(128)] + ["f"] * 128)


@gluon.jit
def rescale(output, factor):
    """``output`` [64, 256] of four warps, in the layout of a WGMMA, times ``factor`` [64, 1] of the same layout.

    Warps whose rows all have factor 1 do nothing.
    """
    return gl.inline_asm_elementwise(
        _rescale_asm(), _rescale_constraints(), [output, factor], gl.float32, is_pure=True, pack=128
    )
