"""Partial outputs of absorbed MLA on Hopper with three bytes per element (``ptx.fp24``).

A partial output is stored in the register order of a consumer: 24 bytes per thread for 16 columns, so that a warp
accesses whole cache lines. Then follow row_max (in base 2) and row_sum of each row; the output is not normalized.
"""

# Triton's calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, ROWS
from flashlatte.kernels.hopper.ptx import fp24
from flashlatte.kernels.hopper.ptx.registers import opaque

# Bytes of 16 columns: 16 bytes for each of 128 threads, then 8 bytes each.
_STEP_BYTES = gl.constexpr(fp24.FIRST_BYTES + 1024)
_HALF_BYTES = gl.constexpr(HALF.value // 16 * _STEP_BYTES.value)
_SUMS_BYTES = gl.constexpr(LATENT.value // HALF.value * _HALF_BYTES.value)
# Words of a partial output: two halves, and two words per row.
PARTIAL = gl.constexpr(_SUMS_BYTES.value // 4 + 2 * ROWS.value)


@gluon.jit
def partial_of_split(scratch, number, group, num_groups):
    """Pointer to the partial output of range ``number`` and a group of rows, if a range has one."""
    return scratch + (number * num_groups + group).to(gl.int64) * PARTIAL


@gluon.jit
def _addresses(half, row, col):
    """Addresses of the first 16 bytes and of the last 8 bytes of a thread's elements of 16 columns, given the address
    of their half."""
    thread = ((row >> 4) * 32 + (row & 7) * 4 + ((col & 7) >> 1)).to(gl.int64)
    step = ((col >> 4) * _STEP_BYTES).to(gl.int64)
    # In this order, so that the addresses of all columns differ by constants only.
    return (half + thread * 16) + step, (half + thread * 8) + step


@gluon.jit
def write(out, row_max, row_sum, partial, rows_in_use, FIRST_COL: gl.constexpr):
    """Write a consumer's ``out`` [64, 256], columns from FIRST_COL; with FIRST_COL 0, also write row_max and row_sum
    [64]."""
    # Opaque: otherwise values that depend on it would occupy registers during the main loop.
    row = opaque(gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout)))[:, None]
    col = gl.arange(0, HALF, gl.SliceLayout(0, out.type.layout))[None, :]
    half = fp24.materialize_int64(partial.to(gl.int64)) + FIRST_COL // HALF * _HALF_BYTES
    first, second = _addresses(half, row, col)
    fp24.store(out, first, second, (row < rows_in_use).to(gl.int32) + col * 0)
    if FIRST_COL == 0:
        row = gl.arange(0, ROWS, row_sum.type.layout)
        sums = partial + _SUMS_BYTES // 4 + row * 2
        gl.store(sums, row_max)
        gl.store(sums + 1, row_sum)


@gluon.jit
def addresses(partial, row, col, FIRST_COL):
    """The two addresses of the elements at ``row`` and FIRST_COL + ``col``, all in one half, of the partial output at
    the int64 address ``partial``. The layout must give a thread groups of eight elements as a consumer holds them."""
    return _addresses(partial + FIRST_COL // HALF * _HALF_BYTES, row, FIRST_COL % HALF + col)


@gluon.jit
def sums_address(partial, row):
    """Address of row_max and row_sum of a row."""
    return partial + _SUMS_BYTES + row * 8
