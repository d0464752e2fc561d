"""How the programs that merge partial results share them: settled on the host from shapes alone."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Of a partial result: rows that are in use, of how many, and columns."""

    in_use: int
    rows: int
    cols: int


class Tile(NamedTuple):
    """What a program merges in a step: of that many splits, rows and columns. A program takes ``steps`` row tiles."""

    rows: int
    cols: int
    splits: int
    steps: int = 1

    def within(self, shape: Shape) -> Tile:
        """The tile, no larger than a partial result."""
        return self._replace(rows=min(self.rows, shape.rows), cols=min(self.cols, 1 << (shape.cols - 1).bit_length()))

    def programs(self, shape: Shape) -> int:
        """How many programs a result takes."""
        return -(-shape.in_use // (self.rows * self.steps)) * -(-shape.cols // self.cols)


# Programs of four warps, with a tile of 8,192 numbers, that a large GPU runs at once.
_RESIDENT = 528
# By splits of an item, of which there are the more the fewer items there are, and by size.
TILES = (
    Tile(1, 32, 128),
    Tile(1, 64, 128),
    Tile(1, 128, 64),
    Tile(1, 32, 32),
    Tile(1, 128, 32),
    Tile(1, 512, 16),
    Tile(1, 512, 8),
    Tile(4, 512, 4),
)


def of_items(shape: Shape, merges: int, likely_splits: int) -> Tile:
    """The first tile of which likely splits fill more than half and that makes no more programs than run at once."""
    for tile in TILES:
        tile = tile.within(shape)
        if tile.splits < 2 * likely_splits and merges * tile.programs(shape) <= _RESIDENT:
            break
    return tile


def of_boundaries(shape: Shape) -> Tile:
    """Where a boundary between parts splits an item in two, or none: few programs for each, that find that out."""
    return Tile(8, 512, 2, steps=2).within(shape)


def of_fixed_splits(shape: Shape) -> Tile:
    """Always the same: the order of merging may not depend on the batch."""
    return Tile(4, 128, 8).within(shape)
