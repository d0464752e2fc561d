"""For Gluon kernels: the layout in which ``ranges`` scans lengths, and float32 partial outputs of absorbed MLA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import LATENT, ROWS
from flashlatte.split_kv.plan import PartialShape

# The shape of a partial output, and its number of elements.
MLA_PARTIAL = PartialShape(ROWS.value, LATENT.value)
PARTIAL = gl.constexpr(MLA_PARTIAL.elements)

# Work items per step of the scan.
_ITEMS = gl.constexpr(128)


@gluon.constexpr_function
def _in_each_warp(ITEMS, WARPS):
    """ITEMS replicated in each warp, so that no reduction crosses warps."""
    return gl.BlockedLayout([ITEMS // 32], [32], [WARPS], [0])


@gluon.jit
def scan_items(ITEMS: gl.constexpr = _ITEMS):
    """The work items 0 … ITEMS - 1 that ``ranges`` reads at a time."""
    return gl.arange(0, ITEMS, _in_each_warp(ITEMS, gl.num_warps()))


@gluon.jit
def write_partial(partial, row, in_use, values, lse2, FIRST_COL: gl.constexpr):
    """Write normalized ``values`` [rows, columns] of ``row`` [rows] at columns from FIRST_COL as a partial output, as
    ``combine.write_partial`` does; with FIRST_COL 0, also write the base-2 ``lse2`` [rows]."""
    col = FIRST_COL + gl.arange(0, values.shape[1], gl.SliceLayout(0, values.type.layout))
    gl.store(partial + (row * LATENT)[:, None] + col[None, :], values, mask=in_use[:, None])
    if FIRST_COL == 0:
        gl.store(partial + ROWS * LATENT + row, lse2, mask=in_use)
