"""Tile sizes for each class of GPUs."""

from __future__ import annotations

from typing import NamedTuple


class TurboQuantConfig(NamedTuple):
    """Tile sizes of a program.

    Attributes:
        block_m: query rows, if there are more than 8.
        block_n: keys of a step.
        num_warps: warps per program. One warp keeps a step's scores and P in its registers.
        num_stages: of the loop over keys: number of prefetched blocks, plus one.
        programs: programs resident on an SM.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


TABLE: dict[str, TurboQuantConfig] = {
    "hopper": TurboQuantConfig(16, 32, 1, 2, 8),
    "blackwell": TurboQuantConfig(16, 32, 1, 3, 8),
    "ampere": TurboQuantConfig(16, 32, 1, 3, 7),
    "small": TurboQuantConfig(16, 32, 1, 2, 6),
    "other": TurboQuantConfig(16, 32, 4, 1, 1),
    "interpreter": TurboQuantConfig(16, 16, 1, 1, 1),
}
