"""Sizes of the kernels' tiles for each class of GPUs: by what fits registers and shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashlatte.kernels.triton.head_dims import MIN_WIDTH

# The head dims that the table is for.
_TABLE_WIDTH = 192 + 128


@dataclass(frozen=True)
class Config:
    """Sizes of a program's tiles.

    Attributes:
        block_m: queries: of a program, or of a step where a program computes keys.
        block_n: keys: of a step, or of a program where that computes keys.
        num_warps: Triton's.
        num_stages: of the loop; 1 loads in place.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Configs:
    """Attributes: of the forward kernel, and of the two backward kernels for gradients of keys and of queries."""

    forward: Config
    keys: Config
    queries: Config


# By class of GPU, for head dims up to 192 and 128. "small" has 99 KiB of shared memory. Wider head dims halve "hopper,
# wide". "hopper, unaligned" keeps to fewer than 64 rows, and so to the tensor-core instructions of a warp: rows that
# cannot be copied asynchronously stay in one buffer, and CUDA 12.8's ptxas, which Triton 3.6 and 3.7 bring, may read
# the descriptor of such a buffer before it is written.
TABLE: dict[str, Configs] = {
    # With 64 keys the forward kernel takes 0.94 (of 16 × 512 tokens) to 0.97 of its time with 128.
    "hopper": Configs(Config(128, 64, 8, 3), Config(64, 128, 8, 2), Config(128, 64, 8, 2)),
    "hopper, wide": Configs(Config(128, 128, 8, 2), Config(64, 128, 8, 2), Config(128, 64, 8, 2)),
    "hopper, unaligned": Configs(Config(32, 64, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    "blackwell": Configs(Config(128, 64, 8, 2), Config(32, 64, 4, 2), Config(64, 32, 4, 2)),
    "ampere": Configs(Config(128, 32, 8, 3), Config(16, 64, 4, 2), Config(64, 16, 4, 2)),
    "small": Configs(Config(128, 64, 8, 2), Config(16, 64, 4, 2), Config(64, 16, 4, 2)),
    "other": Configs(Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    "interpreter": Configs(Config(32, 16, 1, 1), Config(16, 32, 1, 1), Config(32, 16, 1, 1)),
}


def choose(gpu: str, width: int, aligned: bool) -> Configs:
    """The configurations for rows of q and v padded to ``width`` numbers together, that begin at multiples of 16 bytes
    or, if not ``aligned``, anywhere.
    """
    if gpu == "hopper" and not aligned:
        gpu = "hopper, unaligned"
    elif gpu == "hopper" and width > _TABLE_WIDTH:
        gpu = "hopper, wide"
    configs = TABLE[gpu]
    while width > _TABLE_WIDTH:
        configs = Configs(_smaller(configs.forward), _smaller(configs.keys), _smaller(configs.queries))
        width //= 2
    return configs


def _smaller(config: Config) -> Config:
    block_m, block_n = max(config.block_m // 2, MIN_WIDTH), max(config.block_n // 2, MIN_WIDTH)
    return replace(config, block_m=block_m, block_n=block_n, num_stages=min(config.num_stages, 2))
