"""Tile sizes of the kernels for each class of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kernels.triton.online_softmax import gpu_class

SMALLEST = 16  # of a matrix product's sides


@dataclass(frozen=True)
class IndexLogitsConfig:
    """Attributes:
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


def choose(table: dict[str, IndexLogitsConfig], device: torch.device) -> IndexLogitsConfig:
    return table[gpu_class(device)]


def padded_heads(heads: int) -> int:
    return max(1 << (heads - 1).bit_length(), SMALLEST)
