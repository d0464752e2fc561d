"""Sums over heads of a WGMMA result [64 heads, keys]: first over the 16 heads of each warp, by shuffles, then over the
warps, through shared memory. ``gl.sum`` over all heads would need an additional barrier."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS

# Warps of a warpgroup.
WARPS = gl.constexpr(4)
_SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# A thread holds the sums of all warps for one key. 64 keys fill two of the four warps; the other two hold copies.
_PARTS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))
KEY_OF_SUM = gl.constexpr(gl.SliceLayout(0, _PARTS))


@gluon.jit
def allocate_sums(STAGES: gl.constexpr, PARTS: gl.constexpr):
    """Shared memory for sums, float32 [STAGES, PARTS, 64 keys], of PARTS warps with up to 16 heads each."""
    return gl.allocate_shared_memory(gl.float32, [STAGES, PARTS, KEYS], _SUMS)


@gluon.constexpr_function
def _exchanged(step, columns):
    """The layout of [4 warps, 2 rows, remaining rows, columns] after exchange ``step`` of three.

    Initially bits 2 to 4 of the lane select one of eight rows. Each exchange turns one of these bits into a bit of the
    column, so that a thread holds two rows, which it adds.
    """
    bits = (5, 4, 3) if columns == 64 else (4, 3, 0)
    of_column = [bit for bit in range(columns.bit_length() - 1) if bit not in (1, 2, *bits[: step + 1])]
    of_rows = [[0, 0, 1, 0], [0, 0, 2, 0]][: 2 - step]
    exchanged = [[0, 0, 0, 1 << bit] for bit in reversed(bits[: step + 1])]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0, 0], *([0, 0, 0, 1 << bit] for bit in of_column)],
        lane_bases=[[0, 0, 0, 2], [0, 0, 0, 4], *of_rows, *exchanged],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[WARPS.value, 2, 1 << (2 - step), columns],
    )


@gluon.jit
def store_sums(tile, sums):
    """Store the sums over each warp's heads of ``tile`` [64 heads, keys] in ``sums`` [4, keys], 64 or 32 keys.

    With 64 keys a thread holds two rows of 16 keys. In three exchanges lanes swap half of their sums, with 14 shuffles
    in total. A butterfly sum takes 48 shuffles and leaves the result in all lanes.
    """
    COLUMNS: gl.constexpr = tile.shape[1]
    rows = gl.sum(tile.reshape([WARPS, 2, 8, COLUMNS]), axis=1)
    for step in gl.static_range(3):
        halves = rows.reshape([WARPS, 2, 1 << (2 - step), COLUMNS])
        rows = gl.sum(gl.convert_layout(halves, _exchanged(step, COLUMNS)), axis=1)
    sums.store(rows.reshape([WARPS, COLUMNS]))


@gluon.jit
def add_sums(sums):
    """The sums [64 keys] over the warps of ``sums``, in layout ``KEY_OF_SUM``."""
    return gl.sum(sums.load(_PARTS), axis=0)
