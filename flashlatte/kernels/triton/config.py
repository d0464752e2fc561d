"""How a program of the portable decode and sparse kernels is made, for each class of GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from flashlatte.kernels.triton.head_dims import SMALLEST, padded
from flashlatte.kernels.triton.online_softmax import NVIDIA

# The width of a row up to which configurations are as tables have them.
_TABLE_WIDTH = 576
# (latent, rope) columns of the tiles that Hopper's warp groups take.
_WARPGROUP_TILES = ((512, 0), (512, 64))


@dataclass(frozen=True)
class Config:
    """How a program is made.

    Attributes:
        block_h: query rows of a program.
        block_n: keys of a step.
        num_warps: Triton's.
        num_stages: of the loop over keys: 1 loads in place; of rows found by indices 3 has indices a step ahead of
            rows and rows a step ahead of use, 5 two steps each; of rows found by pages n has rows n - 1 steps ahead.
        warpgroups: lay the step out for Hopper's warp groups (``online_softmax_step``).
        programs: programs that an SM runs at once, by their registers and shared memory.
        column_sums: keep the sums of P by columns of the tile, which saves three barriers a step and takes
            registers.
        boxes: load tiles of pages by TMA, where the cache is laid out for it.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    warpgroups: bool = False
    programs: int = 1
    column_sums: bool = True
    boxes: bool = False


class Step(NamedTuple):
    """What a step of the loop over keys is compiled for.

    A kernel takes it as one constant, and Triton writes constants down as JSON: hence a tuple of plain values.

    Attributes:
        head_dim, latent_dim: numbers of a row, and those of its latent part.
        latent, rope: columns of the tiles that hold the latent part and the rest; ``rope`` 0 if there is none.
        block_h, block_n, num_stages, warpgroups, column_sums: as in ``Config``.
        values_first: the values are [latent, rows] (``online_softmax_step``).
        ptx, interpreted: the kernel may hold PTX; it runs in Triton's interpreter.
    """

    head_dim: int
    latent_dim: int
    latent: int
    rope: int
    block_h: int
    block_n: int
    num_stages: int
    warpgroups: bool
    column_sums: bool
    values_first: bool
    ptx: bool
    interpreted: bool


# By class of GPU, the first configuration that holds all query rows, or the last.
Table = dict[str, tuple[Config, ...]]

# For rows in q's dtype that are found by indices.
SELECTED_ROWS: Table = {
    "hopper": (
        Config(16, 64, num_warps=4, num_stages=3, programs=2),
        Config(32, 64, num_warps=8, num_stages=5),
        Config(64, 64, num_warps=8, num_stages=5, warpgroups=True),
    ),
    "blackwell": (
        Config(16, 64, num_warps=4, num_stages=3, programs=2),
        Config(32, 64, num_warps=8, num_stages=5),
    ),
    "ampere": (
        Config(16, 32, num_warps=4, num_stages=3, programs=2),
        Config(32, 32, num_warps=8, num_stages=5),
        Config(64, 32, num_warps=8, num_stages=5),
    ),
    "small": (
        Config(16, 32, num_warps=4, num_stages=5),
        Config(32, 32, num_warps=8, num_stages=3),
    ),
    "other": (
        Config(16, 32, num_warps=4),
        Config(32, 32, num_warps=4),
    ),
    "interpreter": (
        Config(16, 16, num_warps=1),
        Config(32, 32, num_warps=1),
    ),
}


def choose(table: Table, gpu: str, rows: int, head_dim: int, latent_dim: int, *, in_place: bool) -> tuple[Config, Step]:
    """What serves ``rows`` query rows and cache rows of ``head_dim`` numbers, of which ``latent_dim`` are values.

    ``in_place``: a tile of keys is multiplied as it comes from memory, not converted in registers first.
    """
    latent = padded(latent_dim)
    rope = padded(head_dim - latent_dim) if head_dim > latent_dim else 0
    configs = table[gpu]
    config = next((config for config in configs if rows <= config.block_h), configs[-1])
    if config.warpgroups and (latent, rope) not in _WARPGROUP_TILES:
        config = replace(config, block_n=config.block_n // 2, num_stages=3, warpgroups=False, boxes=False)
    width = latent + rope
    # Each doubling of the width halves the block, so that registers and shared memory hold it.
    while width > _TABLE_WIDTH:
        stages = min(config.num_stages, 3)
        config = replace(
            config,
            block_h=max(config.block_h // 2, SMALLEST),
            block_n=max(config.block_n // 2, SMALLEST),
            num_stages=stages if config.block_n > SMALLEST else max(stages - 1, 2),
            programs=1,
        )
        width //= 2
    step = Step(
        head_dim=head_dim,
        latent_dim=latent_dim,
        latent=latent,
        rope=rope,
        block_h=config.block_h,
        block_n=config.block_n,
        num_stages=config.num_stages,
        warpgroups=config.warpgroups,
        column_sums=config.column_sums,
        values_first=config.warpgroups and in_place,
        ptx=gpu in NVIDIA,
        interpreted=gpu == "interpreter",
    )
    return config, step
