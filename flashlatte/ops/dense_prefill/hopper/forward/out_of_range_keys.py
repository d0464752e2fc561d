"""Zeroing of values that do not belong to the request."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.two_consumers import CHUNK, COPY, stage_of
from flashlatte.runtime.gluon_compat import cta_barrier


@gluon.jit
def _zero(tile, first):
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, COPY))
    values = tile.load(COPY)
    tile.store(gl.where((row < first)[:, None], values, 0.0).to(values.dtype))


@gluon.jit
def zero_values(shared, step, work_tile, first_key, IS_LAST: gl.constexpr):
    """Zero the values [keys, d_v] of the last block after the end of the request.

    They belong to another request or to none. Both consumers call this, each before its own product; both write the
    same values.
    """
    if IS_LAST:
        _zero_from(shared.v, stage_of(step), first_key, work_tile.keys)


@gluon.jit
def _zero_from(rings, stage, first_key, keys):
    tile = rings[0].index(stage)
    if first_key + tile.shape[0] > keys:
        COLUMNS: gl.constexpr = tile.shape[1]
        for col in gl.static_range(0, COLUMNS, CHUNK):
            _zero(tile.slice(col, CHUNK, dim=1), keys - first_key)
        if len(rings) == 2:
            _zero(rings[1].index(stage), keys - first_key)
        fence_async_shared()
        cta_barrier()
