"""Sizes of the kernel's tiles, chosen by measurement for each class of GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Widest cache row that the tables below are for.
_TABLE_WIDTH = 576
# Shortest side of a matrix product in Triton.
_SMALLEST = 16


@dataclass(frozen=True)
class Config:
    """How a program is made.

    Attributes:
        block_h: query rows of a program.
        block_n: keys of a step.
        num_warps, num_stages: Triton's; stages are the steps whose keys are in flight.
        programs: programs that an SM runs at once, by their registers and shared memory.
        keys_first: scores as [keys, rows], for matrix units that want a long first side.
        share_scores: each four warps compute the scores of a share of the keys (Hopper, 8 warps, 64 rows).
        prefetch: keys of the next step are brought to the L2 cache during a step (NVIDIA, steps within a page).
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 1
    keys_first: bool = False
    share_scores: bool = False
    prefetch: bool = False


# By class of GPU, and by the query rows that share a kv head: the first configuration that holds them, or the last.
TABLE: dict[str, tuple[Config, ...]] = {
    "hopper": (
        Config(16, 64, num_warps=8, num_stages=3),
        Config(32, 64, num_warps=8, num_stages=3),
        Config(64, 32, num_warps=8, num_stages=3, share_scores=True),
    ),
    # Products of 64 rows would go through tensor memory, which has no room for [64, 512] beside the scores.
    "blackwell": (
        Config(16, 64, num_warps=8, num_stages=3),
        Config(32, 64, num_warps=8, num_stages=3),
    ),
    "ampere": (
        Config(16, 32, num_warps=8, num_stages=4),
        Config(32, 32, num_warps=8, num_stages=3),
        Config(64, 32, num_warps=8, num_stages=3),
    ),
    "small": (
        Config(16, 32, num_warps=8, num_stages=3),
        Config(32, 16, num_warps=8, num_stages=3),
    ),
    "other": (
        Config(16, 32, num_warps=4, num_stages=1),
        Config(32, 32, num_warps=4, num_stages=1),
    ),
    "interpreter": (
        Config(16, 16, num_warps=1, num_stages=1),
        Config(32, 32, num_warps=1, num_stages=1),
    ),
}

# A float8_e4m3fn cache passes through registers on its way to the tensor cores, which leaves fewer for query rows.
FP8_TABLE: dict[str, tuple[Config, ...]] = {
    "hopper": TABLE["hopper"],
    "blackwell": TABLE["blackwell"],
    "ampere": (Config(16, 32, num_warps=8, num_stages=4),),
    "small": (Config(16, 32, num_warps=8, num_stages=3),),
    "other": (Config(16, 16, num_warps=4, num_stages=1),),
    "interpreter": TABLE["interpreter"],
}


def choose(gpu: str, rows: int, width: int, fp8: bool) -> Config:
    """The configuration for ``rows`` query rows of a kv head and cache rows padded to ``width`` numbers."""
    table = (FP8_TABLE if fp8 else TABLE)[gpu]
    config = next((config for config in table if rows <= config.block_h), table[-1])
    while width > _TABLE_WIDTH:
        config = replace(
            config,
            block_h=max(config.block_h // 2, _SMALLEST),
            block_n=max(config.block_n // 2, _SMALLEST),
            num_stages=config.num_stages if config.block_n > _SMALLEST else max(config.num_stages - 1, 1),
        )
        width //= 2
    return config
