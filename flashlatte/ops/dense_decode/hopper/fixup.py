"""Stream-K fixup: the CTA that begins a request writes its result, after adding the partial outputs of CTAs with later
ranges.

Wins "b 128, s_q 1, 4,096 varlen" by 7% (286 instead of 308 µs with a combine; docs/notes/dense-decode.md).

A CTA processes a request that its range continues first, and a request that its range begins last, so CTAs rarely wait.
A partial output is float32: a flag for each half (0 until it is written; then whether the request continues in the next
range), the base-2 lse [64], and both halves in the register order of the consumers.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, OUTPUT_ROWS, ROWS
from flashlatte.kernels.hopper.ptx import output_tiles as ptx
from flashlatte.kernels.hopper.softmax import rescale
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.runtime.triton_kernel import kernel

# Flags of a half that has been written.
_ENDS = gl.constexpr(1.0)
_CONTINUES = gl.constexpr(2.0)
# Offsets of the lse and of the halves, and the elements of a partial output.
_LSE = gl.constexpr(4)
_VALUES = gl.constexpr(_LSE.value + ROWS.value)
PARTIAL = gl.constexpr(_VALUES.value + ROWS.value * LATENT.value)

# Partial outputs per CTA of the clearing kernel.
CLEARED_PARTIALS = 256


@kernel
def clear_kernel(scratch, partials: tl.int32, PARTIAL: tl.constexpr, CLEARED_PARTIALS: tl.constexpr):
    """Zero the two flags of each of ``partials`` partial outputs, before the attention kernel."""
    # The next kernel may start: it computes its schedule before it waits for this one.
    gdc_launch_dependents()
    # The preceding kernel in the stream may still use the same scratch.
    gdc_wait()
    number = tl.program_id(0) * CLEARED_PARTIALS + tl.arange(0, CLEARED_PARTIALS)
    flags = scratch + number.to(tl.int64)[:, None] * PARTIAL + tl.arange(0, 2)[None, :]
    tl.store(flags, 0.0, mask=(number < partials)[:, None])


@gluon.jit
def _partial(args, number):
    """Pointer to the partial output of a range for the CTA's row group."""
    group = args.work.group
    return args.results.scratch + (number * group.count + group.number).to(gl.int64) * PARTIAL


@gluon.jit
def _half(partial, FIRST_COL: gl.constexpr):
    """Addresses [64, 1] of half of a partial output: each row has the address of its warp."""
    warp = gl.arange(0, ROWS, OUTPUT_ROWS) // 16
    return ((partial + _VALUES + FIRST_COL * ROWS).to(gl.int64) + warp * (32 * 16))[:, None]


@gluon.jit
def add_later_splits(out, row_max, row_sum, begins, continues_later, args, FIRST_COL: gl.constexpr):
    """Add the partial outputs of later ranges of a request. Returns also whether the request continues after them.

    The first range sums all partial outputs; later ranges pre-reduce them as in a Fenwick tree: range r adds those
    before r plus the lowest set bit of r, so the number of additions per CTA is logarithmic. The order of additions
    depends only on the range numbers, not on timing: results are bitwise reproducible.
    """
    own = args.work.number
    number = own + 1
    stop = gl.where(begins, args.work.num_splits, own + (own & -own))
    while continues_later & (number < stop):
        partial = _partial(args, number)
        ptx.wait_flags(partial)
        continues_later = gl.load(partial, volatile=True) == _CONTINUES
        lse2 = gl.load(partial + _LSE + gl.arange(0, ROWS, OUTPUT_ROWS))
        new_max = gl.maximum(row_max, lse2)
        weight = gl.exp2(lse2 - new_max)
        alpha = gl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + weight
        out = ptx.add_registers(rescale(out, alpha), _half(partial, FIRST_COL), weight[:, None])
        row_max = new_max
        number += number & -number
    return out, row_max, row_sum, continues_later


@gluon.jit
def store_partial(values, lse2, continues_later, args, FIRST_COL: gl.constexpr):
    """Store half of a partial output ``values`` [64, 256]; with FIRST_COL 0, also ``lse2`` [64]."""
    partial = _partial(args, args.work.number)
    ptx.store_registers(_half(partial, FIRST_COL), values)
    if FIRST_COL == 0:
        gl.store(partial + _LSE + gl.arange(0, ROWS, OUTPUT_ROWS), lse2)
    cta_barrier()
    ptx.set_flag(partial + FIRST_COL // HALF, gl.where(continues_later, _CONTINUES, _ENDS))
