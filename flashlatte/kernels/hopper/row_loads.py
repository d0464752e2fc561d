"""Loads of rows into tiles in shared memory: heads of a query token by TMA, selected keys by ``cp.async``."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import COPY
from flashlatte.runtime.gluon_compat import cp_async, tma_load
from flashlatte.runtime.kernel_records import Int64, Pointer

# Columns of a TMA box: 128 bytes, the width of the swizzle.
BOX = gl.constexpr(64)
# A thread copies 16 bytes at a time, eight adjacent threads the 128 bytes of a swizzled row.
GATHERED_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, COPY))


class LatentKeys(NamedTuple):
    """Keys in global memory. ``stride`` is in units of 16 bytes."""

    start: Pointer
    stride: Int64


class GatheredKeys(NamedTuple):
    """Pointers [64] to the rows of a tile of keys, and whether each row is valid [64]."""

    pointers: Any
    valid: Any


@gluon.jit
def load_columns(descriptor, token, head, FIRST: gl.constexpr, full, tile):
    """Load a tile [64 heads, 64 n columns] from column FIRST on, of a descriptor of boxes [1, 64 heads, 64 columns]."""
    WIDTH: gl.constexpr = tile.shape[1]
    for column in gl.static_range(0, WIDTH, BOX):
        tma_load(descriptor, [token, head, FIRST + column], full, tile.slice(column, BOX, dim=1))


@gluon.jit
def gathered_keys(indices, keys, s_kv):
    """The rows of ``LatentKeys`` at ``indices`` [64], in layout ``GATHERED_ROWS``; indices outside 0 to s_kv - 1 are
    invalid."""
    valid = (indices >= 0) & (indices < s_kv)
    # The stride is in units of 16 bytes, so that the compiler can derive the alignment for 16-byte copies.
    ELEMENTS: gl.constexpr = 128 // keys.start.dtype.element_ty.primitive_bitwidth
    offsets = gl.where(valid, indices, 0).to(gl.int64) * keys.stride * ELEMENTS
    return GatheredKeys(keys.start + offsets, valid)


@gluon.jit
def copy_columns(gathered, FIRST: gl.constexpr, tile):
    """Start the copies of columns of ``GatheredKeys`` from FIRST on. Invalid rows are filled with zeros: their P is 0,
    and 0 · NaN would be NaN."""
    pointers = gathered.pointers[:, None] + (FIRST + gl.arange(0, tile.shape[1], _COLUMNS))[None, :]
    cp_async(tile, pointers, mask=gathered.valid[:, None])
