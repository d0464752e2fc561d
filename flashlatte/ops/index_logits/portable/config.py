"""Tile sizes of the kernels for each class of GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexLogitsConfig:
    """Tile sizes of a program.

    Attributes:
        rows: query rows (queries times heads, heads padded) of a product.
        block_n: keys of a tile.
        num_warps, num_stages: Triton's launch options.
        tiles: key tiles per program, for contiguous keys.
        programs: programs resident on an SM.
    """

    rows: int
    block_n: int
    num_warps: int
    num_stages: int
    tiles: int = 16
    programs: int = 2


# By class of GPU (``online_softmax.gpu_class``), for contiguous keys, and for paged caches.
RAGGED = {
    "hopper": IndexLogitsConfig(128, 64, num_warps=4, num_stages=3),
    "blackwell": IndexLogitsConfig(128, 64, num_warps=4, num_stages=3),
    "ampere": IndexLogitsConfig(128, 64, num_warps=8, num_stages=3),
    "small": IndexLogitsConfig(128, 64, num_warps=8, num_stages=2),
    "other": IndexLogitsConfig(128, 64, num_warps=4, num_stages=2),
    "interpreter": IndexLogitsConfig(32, 16, num_warps=1, num_stages=1, tiles=2),
}
PAGED = {
    "hopper": IndexLogitsConfig(128, 64, num_warps=4, num_stages=4),
    "blackwell": IndexLogitsConfig(128, 64, num_warps=4, num_stages=4),
    "ampere": IndexLogitsConfig(128, 64, num_warps=4, num_stages=3),
    "small": IndexLogitsConfig(128, 64, num_warps=4, num_stages=2),
    "other": IndexLogitsConfig(128, 64, num_warps=4, num_stages=2),
    "interpreter": IndexLogitsConfig(32, 16, num_warps=1, num_stages=1, programs=1),
}
