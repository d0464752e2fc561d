"""Tiles for rows of any number of columns: Triton's have a power of two of them."""

from __future__ import annotations

# The shortest side of a matrix product in Triton.
SMALLEST = 16


def parts(head_dim: int) -> tuple[int, int]:
    """Widths, powers of two, of two tiles that hold a row of q or k; the second is 0 if the first holds all of it."""
    whole = padded(head_dim)
    rest = padded(head_dim - whole // 2)
    return (whole, 0) if whole // 2 < SMALLEST or whole // 2 + rest >= whole else (whole // 2, rest)


def padded(width: int) -> int:
    """The width of a tile that holds ``width`` columns."""
    return max(1 << max(width - 1, 0).bit_length(), SMALLEST)
