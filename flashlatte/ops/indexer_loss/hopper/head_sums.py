"""Sums over heads of a tile [64 heads, keys] that WGMMA left in registers: first over the 16 heads of each warp, by
shuffles, then over the warps, through shared memory. A sum over all heads at once would need a barrier more."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS, ROWS

# Warps of a warpgroup.
WARPS = gl.constexpr(4)
_SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# A thread has the sums of all warps of one key; 64 keys fill two of four warps, and the other two have the same.
_PARTS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))
KEY_OF_SUM = gl.constexpr(gl.SliceLayout(0, _PARTS))


@gluon.jit
def allocate_sums(STAGES: gl.constexpr, PARTS: gl.constexpr):
    """Float32 [STAGES, PARTS, 64 keys]: PARTS warps of up to 16 heads each."""
    return gl.allocate_shared_memory(gl.float32, [STAGES, PARTS, KEYS], _SUMS)


@gluon.jit
def store_sums(tile, sums):
    """Store the sums of each warp over its heads in ``sums`` [4, keys]."""
    sums.store(gl.sum(tile.reshape([WARPS, ROWS // WARPS, tile.shape[1]]), axis=1))


@gluon.jit
def add_sums(sums):
    """The sums over the warps [64 keys], in layout ``KEY_OF_SUM``."""
    return gl.sum(sums.load(_PARTS), axis=0)
