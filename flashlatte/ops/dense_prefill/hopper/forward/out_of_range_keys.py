"""Zeroing of values that do not belong to the request."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.two_consumers import CHUNK, COPY
from flashlatte.runtime.gluon_compat import cta_barrier


@gluon.jit
def _zero(tile, first):
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, COPY))
    values = tile.load(COPY)
    tile.store(gl.where((row < first)[:, None], values, 0.0).to(values.dtype))


@gluon.jit
def zero_values(tiles, stage, first):
    """Zero the values [keys, d_v] of a stage from row ``first`` on.

    They belong to another request or to none and may be NaN, and 0 · NaN is NaN. Both consumers call this, each before
    its own product; both write the same values.
    """
    tile = tiles[0].index(stage)
    COLUMNS: gl.constexpr = tile.shape[1]
    for col in gl.static_range(0, COLUMNS, CHUNK):
        _zero(tile.slice(col, CHUNK, dim=1), first)
    if len(tiles) == 2:
        _zero(tiles[1].index(stage), first)
    fence_async_shared()
    cta_barrier()
