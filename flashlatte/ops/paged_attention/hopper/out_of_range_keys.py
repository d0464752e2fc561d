"""Zeroing of values that are visible to none of a tile's queries."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.two_consumers import COPY, stage_of
from flashlatte.ops.paged_attention.hopper.tiles import KEYS
from flashlatte.runtime.gluon_compat import cta_barrier


@gluon.jit
def zero_values(shared, step, work_tile, first_key, IS_LAST: gl.constexpr):
    """Zero the values [v_chunks * 128, 64] of a block outside of the visible keys of the tile.

    They belong to another request or to none. Both consumers call this, each before its own product; both write the
    same values.
    """
    if (first_key < work_tile.first_key) | (first_key + KEYS > work_tile.keys):
        tile = shared.v[0].index(stage_of(step))
        first = work_tile.first_key - first_key
        stop = work_tile.keys - first_key
        row = gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
        for chunk in gl.static_range(tile.shape[0] // KEYS):
            part = tile.slice(chunk * KEYS, KEYS, dim=0)
            values = part.load(COPY)
            part.store(gl.where(((row >= first) & (row < stop))[:, None], values, 0.0).to(values.dtype))
        fence_async_shared()
        cta_barrier()
