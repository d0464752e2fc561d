"""Convert a WGMMA result to a layout with adjacent columns in a thread, for 16-byte stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _layout(columns, lane_columns):
    """The layout of a WGMMA result [64, columns] with the column bits ``lane_columns`` in the lane, and the others in
    registers."""
    bits = [1 << i for i in range(columns.bit_length() - 1) if 1 << i not in lane_columns]
    narrow, wide = [[0, bit] for bit in bits if bit < 32], [[0, bit] for bit in bits if bit >= 32]
    return gl.DistributedLinearLayout(
        reg_bases=[*narrow, [8, 0], *wide],
        lane_bases=[*([0, bit] for bit in lane_columns), [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def to_vector_layout(tile):
    """``tile`` [64, columns] of two-byte elements with eight adjacent columns in a thread, or four if there are 16
    columns; a WGMMA result has two.

    Each conversion exchanges one bit between the four threads of a row, which needs only shuffles. A single conversion
    of both bits would go through shared memory, which may be fully used.
    """
    COLUMNS: gl.constexpr = tile.shape[1]
    tile = gl.convert_layout(tile, _layout(COLUMNS, (8, 4)))
    if COLUMNS > 16:
        tile = gl.convert_layout(tile, _layout(COLUMNS, (8, 16)))
    return tile
