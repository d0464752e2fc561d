"""State shared by the three partitions: tiles in shared memory, barriers, and the selection."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import allocate_mbarrier
from flashlatte.kernels.hopper.mla_tiles import (
    OWN_BARRIERS,
    LatentTile,
    QuarterFullBarriers,
    allocate_quarter_barriers,
    allocate_rows,
    allocate_square,
    allocate_tiles,
    allocate_vector,
)
from flashlatte.kernels.hopper.shared_memory import find_tiles, offset_of
from flashlatte.kernels.triton.selections import TokenSelections, first_index, selected_count
from flashlatte.runtime.kernel_records import Int32

# Named barrier: the queries are empty, both consumers to the producer.
Q_EMPTY = gl.constexpr(OWN_BARRIERS)


class SparsePrefillShared(NamedTuple):
    """Shared memory in addition to ``mla_tiles.MlaTiles``."""

    mask0: Any  # int32 [64], 0 where an index selects nothing
    mask1: Any
    score_max0: Any  # float32 [64], the even consumer's maximum of unscaled scores
    q_full: Any
    full0: QuarterFullBarriers
    full1: QuarterFullBarriers
    q_offsets: LatentTile
    k1_offsets: LatentTile


class SparsePrefillWork(NamedTuple):
    """The selection and its sizes. A tile is 64 heads of one query token, or 64 / GROUP heads of each of GROUP tokens.

    A tile of several tokens has a list of entries (``unions``) instead of indices.
    """

    selections: TokenSelections
    head_blocks: Int32
    tiles: Int32
    tokens: Int32


@gluon.jit
def list_of(work, tile):
    """Index of the list of a tile: its token or group. Tiles after the last one use the last list."""
    return gl.minimum(tile, work.tiles - 1) // work.head_blocks


@gluon.jit
def rows_of(group, head_block, row, GROUP: gl.constexpr):
    """Query tokens and heads of the rows of a tile."""
    HEADS: gl.constexpr = 64 // GROUP
    if GROUP == 1:
        return group, head_block * HEADS + row
    else:
        return group * GROUP + row // HEADS, head_block * HEADS + row % HEADS


@gluon.jit
def row_exists(work, token, head, heads, GROUP: gl.constexpr):
    """Whether a row exists."""
    if GROUP == 1:
        return head < heads
    else:
        return (head < heads) & (token < work.tokens)


@gluon.jit
def num_selected(work, tile):
    """The number of indices in the tile's list."""
    return selected_count(work.selections, list_of(work, tile), work.selections.topk)


@gluon.jit
def indices_of(work, tile):
    """Pointer to the first index of the tile's list."""
    return first_index(work.selections, list_of(work, tile))


@gluon.jit
def num_steps(count):
    """Steps of two blocks for ``count`` indices: at least one, which is fully masked without indices."""
    return gl.maximum((count + 127) // 128, 1)


@gluon.jit
def _find_offsets(q, k1, HEAD_DIM: gl.constexpr):
    # Inline PTX fills the tile of q, and stores output from the tiles of block 1.
    if HEAD_DIM == 576:
        found = find_tiles(
            (q.left.index(0), q.right.index(0), k1.left.index(0), k1.right.index(0), q.rope.index(0), k1.rope.index(0))
        )
    else:
        found = find_tiles((q.left.index(0), q.right.index(0), k1.left.index(0), k1.right.index(0)))
    q_offsets = LatentTile(offset_of(0, found), offset_of(1, found), offset_of(4, found))
    return q_offsets, LatentTile(offset_of(2, found), offset_of(3, found), offset_of(5, found))


@gluon.jit
def allocate(DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    q = allocate_rows(DTYPE, HEAD_DIM == 576)
    k0 = allocate_rows(DTYPE, HEAD_DIM == 576)
    k1 = allocate_rows(DTYPE, HEAD_DIM == 576)
    # P of block 0 is live only between the last read of the block's RoPE columns and their refill.
    p0 = k0.rope if HEAD_DIM == 576 else allocate_square(DTYPE)
    p1 = allocate_square(DTYPE)
    mask0 = allocate_vector(gl.int32)
    mask1 = allocate_vector(gl.int32)
    q_offsets, k1_offsets = _find_offsets(q, k1, HEAD_DIM)
    q_full = allocate_mbarrier(128)
    full0 = allocate_quarter_barriers()
    full1 = allocate_quarter_barriers()
    tiles = allocate_tiles(q, k0, k1, p0, p1)
    return tiles, SparsePrefillShared(
        mask0, mask1, allocate_vector(gl.float32), q_full, full0, full1, q_offsets, k1_offsets
    )
