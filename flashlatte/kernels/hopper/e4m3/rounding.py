"""Rounding of queries to e4m3."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def largest_of(x):
    """The largest absolute value of each row of ``x`` [rows, columns]."""
    return gl.max(gl.abs(x.to(gl.float32)), 1)


@gluon.jit
def two_terms(x):
    """Two e4m3 terms with the sum ``x``, float32."""
    first_term = _round(x)
    second_term = (x - first_term).to(gl.float8e4nv)
    return first_term.to(gl.float8e4nv), second_term


@gluon.jit
def _round(x):
    """float32 ``x`` rounded to the four significant bits of e4m3 (below 2^-6, e4m3 has fewer).

    Computed by integer operations: in a loop that converts values to e4m3 and back, ptxas 12.8 reads those of the
    previous iteration (docs/notes/dense-decode-fp8.md).
    """
    bits = x.to(gl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(gl.float32, bitcast=True)
