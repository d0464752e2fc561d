"""Partial outputs of absorbed MLA on Hopper that take three bytes a number.

A partial output lies as a consumer's registers do: for 16 of its columns 24 bytes a thread, so that what a warp stores
or loads at a time is whole lines, of numbers rounded to three bytes (``ptx.rounded``). Then, for each row, row_max (in
base 2) and row_sum, by which the output is not yet divided.
"""

# Triton's calls are not Python's.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, ROWS
from flashlatte.kernels.hopper.ptx import rounded
from flashlatte.kernels.hopper.ptx.registers import opaque

# Bytes of 16 columns: 16 for each of 128 threads, and 8.
_STEP_BYTES = gl.constexpr(rounded.FIRST_BYTES + 1024)
_HALF_BYTES = gl.constexpr(HALF.value // 16 * _STEP_BYTES.value)
_SUMS_BYTES = gl.constexpr(LATENT.value // HALF.value * _HALF_BYTES.value)
# Words of a partial output: two halves, and two for each row.
PARTIAL = gl.constexpr(_SUMS_BYTES.value // 4 + 2 * ROWS.value)


@gluon.jit
def _addresses(half, row, col):
    """Addresses of the first 16 bytes of a thread's numbers of 16 columns, and of the other 8, from their half's."""
    thread = ((row >> 4) * 32 + (row & 7) * 4 + ((col & 7) >> 1)).to(gl.int64)
    step = ((col >> 4) * _STEP_BYTES).to(gl.int64)
    # In this order, for addresses of all columns that are the same but for a constant.
    return (half + thread * 16) + step, (half + thread * 8) + step


@gluon.jit
def write(out, row_max, row_sum, partial, rows_in_use, FIRST_COL: gl.constexpr):
    """Write the columns ``out`` [64, 256] from FIRST_COL that a consumer has; those from 0 bring row_max and row_sum
    [64] along."""
    # Opaque: else what follows from it would lie in registers throughout the main loop.
    row = opaque(gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout)))[:, None]
    col = gl.arange(0, HALF, gl.SliceLayout(0, out.type.layout))[None, :]
    half = rounded.computed_before(partial.to(gl.int64)) + FIRST_COL // HALF * _HALF_BYTES
    first, second = _addresses(half, row, col)
    rounded.store(out, first, second, (row < rows_in_use).to(gl.int32) + col * 0)
    if FIRST_COL == 0:
        row = gl.arange(0, ROWS, row_sum.type.layout)
        sums = partial + _SUMS_BYTES // 4 + row * 2
        gl.store(sums, row_max)
        gl.store(sums + 1, row_sum)


@gluon.jit
def addresses(partial, row, col, FIRST_COL):
    """Where numbers of the partial output at the int64 address ``partial`` lie: the two addresses of each, in a layout
    that gives a thread eight of them as a consumer has them, at ``row`` and FIRST_COL + ``col``, all in one half."""
    return _addresses(partial + FIRST_COL // HALF * _HALF_BYTES, row, FIRST_COL % HALF + col)


@gluon.jit
def sums_address(partial, row):
    """Where row_max and row_sum of a row lie."""
    return partial + _SUMS_BYTES + row * 8


@gluon.jit
def add_splits(combined, row_max, row_sum, maxima, sums, values):
    """Add splits, of which ``maxima``, ``sums`` and ``values`` are tuples, to what was combined before them: the sum of
    their values, relative to the row_max that is returned with it, and the sum of their row_sum."""
    COL: gl.constexpr = len(row_max.shape)
    new_max = row_max
    for i in gl.static_range(len(maxima)):
        new_max = gl.maximum(new_max, maxima[i])
    alpha = gl.exp2(row_max - new_max)
    row_sum *= alpha
    combined *= gl.expand_dims(alpha, COL)
    for i in gl.static_range(len(maxima)):
        weight = gl.exp2(maxima[i] - new_max)
        row_sum += weight * sums[i]
        combined += gl.expand_dims(weight, COL) * values[i]
    return combined, new_max, row_sum
