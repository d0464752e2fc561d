"""A WGMMA's result with neighbouring columns in a thread, for stores of 16 bytes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _layout(columns, lane_columns):
    """That of a product [64, columns] with other column bits in a thread's lane; the others are in registers."""
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
def neighbours(tile):
    """``tile`` [64, columns] of two-byte numbers with eight neighbouring columns in a thread, or four of 16: a product
    has two.

    Each step exchanges one bit between the four threads of a row, which takes shuffles only. For both at once the
    compiler would go through shared memory, and there may be none to spare.
    """
    COLUMNS: gl.constexpr = tile.shape[1]
    tile = gl.convert_layout(tile, _layout(COLUMNS, (8, 4)))
    if COLUMNS > 16:
        tile = gl.convert_layout(tile, _layout(COLUMNS, (8, 16)))
    return tile
