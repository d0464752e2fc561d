"""Tile widths for rows of any number of columns: a Triton tile has a power of two of columns."""

from __future__ import annotations

# The minimum side of a matrix product in Triton.
MIN_WIDTH = 16


def tile_widths(head_dim: int) -> tuple[int, int]:
    """Widths (powers of two) of two tiles that together hold a row of q or k; the second is 0 if one tile is enough."""
    whole = padded(head_dim)
    rest = padded(head_dim - whole // 2)
    return (whole, 0) if whole // 2 < MIN_WIDTH or whole // 2 + rest >= whole else (whole // 2, rest)


def padded(width: int) -> int:
    """The width of a tile for ``width`` columns: a power of two, at least MIN_WIDTH."""
    return max(1 << max(width - 1, 0).bit_length(), MIN_WIDTH)
