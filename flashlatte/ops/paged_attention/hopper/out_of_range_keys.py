"""Masking of scores and zeroing of values for keys outside of the request or in pages that are not in the cache."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.ptx.registers import mask_eights
from flashlatte.kernels.hopper.two_consumers import COPY, ROWS
from flashlatte.ops.paged_attention.hopper.tiles import KEYS, SCORES
from flashlatte.runtime.gluon_compat import cta_barrier


@gluon.jit
def mask_absent_pages(scores, absent):
    """Scores [64, 128] of a block, with -inf for keys whose page is not in the cache. ``absent``: one bit per 8
    keys."""
    if absent != 0:
        scores = mask_eights(scores, gl.full([ROWS, KEYS], 0, gl.int32, SCORES) + absent)
    return scores


@gluon.jit
def zero_values(tile, first, stop):
    """Zero the values [v_chunks * 128, 64] of a block outside of keys ``first`` to ``stop`` - 1.

    They belong to another request or to none and may be NaN, and 0 · NaN is NaN. Both consumers call this, each before
    its own product; both write the same values.
    """
    row = gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    for chunk in gl.static_range(tile.shape[0] // KEYS):
        part = tile.slice(chunk * KEYS, KEYS, dim=0)
        values = part.load(COPY)
        part.store(gl.where(((row >= first) & (row < stop))[:, None], values, 0.0).to(values.dtype))
    fence_async_shared()
    cta_barrier()
