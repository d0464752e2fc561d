"""Sizes of the kernel's tiles for each class of GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Row width that the tables below are for, and the shortest side of a matrix product in Triton.
_TABLE_WIDTH = 576
_SMALLEST = 16


@dataclass(frozen=True)
class Config:
    """How a program is made.

    Attributes:
        block_h: heads of a program.
        block_n: keys of a step.
        num_warps: Triton's.
        num_stages: of the loop over keys of a cache without scales: 1 loads in place; 3 has indices a step ahead of
            rows and rows a step ahead of use, 5 two steps each.
        warpgroups: lay the step out for Hopper's warp groups (``triton_attention.weigh``).
        programs: programs that an SM runs at once, by their registers and shared memory.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    warpgroups: bool = False
    programs: int = 1


# By class of GPU, the first configuration that holds all heads, or the last. "small" has 99 KiB of shared memory.
PLAIN_TABLE: dict[str, tuple[Config, ...]] = {
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

# Of the caches with scales.
PACKED_TABLE: dict[str, tuple[Config, ...]] = {
    "hopper": (
        Config(16, 64, num_warps=8),
        Config(32, 64, num_warps=8),
        Config(64, 64, num_warps=8, warpgroups=True),
    ),
    "blackwell": (
        Config(16, 64, num_warps=8),
        Config(32, 64, num_warps=8),
    ),
    "ampere": (
        Config(16, 64, num_warps=8),
        Config(32, 32, num_warps=8),
        Config(64, 32, num_warps=8),
    ),
    "small": (
        Config(16, 32, num_warps=8),
        Config(32, 32, num_warps=8),
    ),
    "other": (
        Config(16, 16, num_warps=4),
        Config(32, 16, num_warps=4),
    ),
    "interpreter": (
        Config(16, 16, num_warps=1),
        Config(32, 32, num_warps=1),
    ),
}


def choose(gpu: str, packed: bool, heads: int, latent: int, rope: int) -> Config:
    """The configuration for rows padded to ``latent`` + ``rope`` numbers."""
    table = (PACKED_TABLE if packed else PLAIN_TABLE)[gpu]
    config = next((config for config in table if heads <= config.block_h), table[-1])
    if config.warpgroups and (latent, rope) not in ((512, 0), (512, 64)):
        config = replace(config, block_n=config.block_n // 2, num_stages=3, warpgroups=False)
    width = latent + rope
    while width > _TABLE_WIDTH:
        config = replace(
            config,
            block_h=max(config.block_h // 2, _SMALLEST),
            block_n=max(config.block_n // 2, _SMALLEST),
            num_stages=min(config.num_stages, 3),
            programs=1,
        )
        width //= 2
    return config
