"""Stream-K fixup: a CTA that begins a request finishes it, and adds what CTAs with later ranges have of it.

Wins "b 128, s_q 1, 4,096 varlen" by 7% (286 instead of 308 µs with a combine; docs/notes/dense-decode.md).

A CTA whose range continues a request works on it first, and who begins one is done with it last, so that there is
little to wait for. What passes between them, of float32 numbers: a flag for each half of the output (0 until it is
there, then whether the request goes on in the next range), the base-2 lse [64], and the halves in the order of the
consumers' registers.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, OUTPUT_ROWS, ROWS
from flashlatte.kernels.hopper.ptx import outputs as ptx
from flashlatte.kernels.hopper.softmax import rescale
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.runtime.triton_kernel import kernel

# Flags of a half that is there.
_ENDS = gl.constexpr(1.0)
_GOES_ON = gl.constexpr(2.0)
# Where lse and halves begin, and the numbers of a partial output.
_LSE = gl.constexpr(4)
_VALUES = gl.constexpr(_LSE.value + ROWS.value)
PARTIAL = gl.constexpr(_VALUES.value + ROWS.value * LATENT.value)

# Partial outputs whose flags a CTA of the clearing kernel clears.
CLEARED = 256


@kernel
def clear_kernel(scratch, partials: tl.int32, PARTIAL: tl.constexpr, CLEARED: tl.constexpr):
    """The kernel before the kernel: no partial output is there yet. Zero the two flags of each of ``partials``."""
    # The next kernel may start: it finds its work, and then waits for the end of this one.
    gdc_launch_dependents()
    # The kernel before this one in the stream may still run, in the same scratch.
    gdc_wait()
    number = tl.program_id(0) * CLEARED + tl.arange(0, CLEARED)
    flags = scratch + number.to(tl.int64)[:, None] * PARTIAL + tl.arange(0, 2)[None, :]
    tl.store(flags, 0.0, mask=(number < partials)[:, None])


@gluon.jit
def _partial(call, number):
    """The partial output of a range, for the CTA's group of rows."""
    group = call.work.group
    return call.results.scratch + (number * group.count + group.number).to(gl.int64) * PARTIAL


@gluon.jit
def _half(partial, FIRST_COL: gl.constexpr):
    """Addresses of half of a partial output [64, 1], for each row that of its warp."""
    warp = gl.arange(0, ROWS, OUTPUT_ROWS) // 16
    return ((partial + _VALUES + FIRST_COL * ROWS).to(gl.int64) + warp * (32 * 16))[:, None]


@gluon.jit
def add_later_splits(out, row_max, row_sum, begins, goes_on, call, FIRST_COL: gl.constexpr):
    """Add what the next ranges have of a request, and tell whether it goes on still.

    Who begins a request adds all of it; the others gather for it, as in a Fenwick tree: range r those up to r plus the
    lowest bit of r, so that of a request over many ranges nobody has much to add. Which ones depends on their numbers
    alone, whatever the order in which they come: results are the same bit for bit.
    """
    own = call.work.number
    number = own + 1
    stop = gl.where(begins, call.work.num_splits, own + (own & -own))
    while goes_on & (number < stop):
        partial = _partial(call, number)
        ptx.wait_for_flags(partial)
        goes_on = gl.load(partial, volatile=True) == _GOES_ON
        lse2 = gl.load(partial + _LSE + gl.arange(0, ROWS, OUTPUT_ROWS))
        new_max = gl.maximum(row_max, lse2)
        weight = gl.exp2(lse2 - new_max)
        alpha = gl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + weight
        out = ptx.add_registers(rescale(out, alpha), _half(partial, FIRST_COL), weight[:, None])
        row_max = new_max
        number += number & -number
    return out, row_max, row_sum, goes_on


@gluon.jit
def leave(values, lse2, goes_on, call, FIRST_COL: gl.constexpr):
    """Leave half of a partial output ``values`` [64, 256]; the half from column 0 brings ``lse2`` [64] along."""
    partial = _partial(call, call.work.number)
    ptx.store_registers(_half(partial, FIRST_COL), values)
    if FIRST_COL == 0:
        gl.store(partial + _LSE + gl.arange(0, ROWS, OUTPUT_ROWS), lse2)
    cta_barrier()
    ptx.raise_flag(partial + FIRST_COL // HALF, gl.where(goes_on, _GOES_ON, _ENDS))
