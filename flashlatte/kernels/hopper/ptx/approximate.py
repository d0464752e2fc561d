"""Elementary functions as one instruction; subnormal arguments and results are flushed to zero."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exp2(x):
    """2^x. ``gl.exp2`` takes three more instructions an element for subnormal results."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)
