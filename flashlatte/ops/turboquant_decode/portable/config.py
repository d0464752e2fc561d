"""Sizes of the kernel's tiles for each class of GPUs."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """Sizes of a program's tiles.

    Attributes:
        block_m: query rows, if there are more than 8.
        block_n: keys of a step.
        num_warps: Triton's. One warp keeps a step's scores and weights in its registers.
        num_stages: of the loop over keys: blocks that are loaded ahead, and one.
        programs: of an SM at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


TABLE: dict[str, Config] = {
    "hopper": Config(16, 32, 1, 2, 8),
    "blackwell": Config(16, 32, 1, 3, 8),
    "ampere": Config(16, 32, 1, 3, 7),
    "small": Config(16, 32, 1, 2, 6),
    "other": Config(16, 32, 4, 1, 1),
    "interpreter": Config(16, 16, 1, 1, 1),
}
