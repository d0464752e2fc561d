"""Tile sizes for each class of GPUs, limited by registers and shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashlatte.kernels.triton.config import MIN_WIDTH

# The head dims for which the table was measured.
_TABLE_WIDTH = 192 + 128


@dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes of a program.

    Attributes:
        block_m: queries per program, or per step in the kernel for dK and dV.
        block_n: keys per step, or per program in the kernel for dK and dV.
        num_warps: warps per program.
        num_stages: pipeline stages of the loop; 1 for none.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PrefillConfigs:
    """The configurations of the forward kernel, and of the backward kernels for keys (dK, dV) and queries (dQ)."""

    forward: PrefillConfig
    keys: PrefillConfig
    queries: PrefillConfig


# By class of GPU, for head dims up to 192 and 128. "small" has 99 KiB of shared memory. Wider head dims halve "hopper,
# wide". "hopper, unaligned" has fewer than 64 rows, so that it uses the MMA instructions of a warp instead of WGMMA:
# rows that cannot be copied asynchronously stay in one buffer, and CUDA 12.8's ptxas, which ships with Triton 3.6 and
# 3.7, may read the descriptor of such a buffer before it is written.
TABLE: dict[str, PrefillConfigs] = {
    # With 64 keys the forward kernel takes 0.94 (of 16 × 512 tokens) to 0.97 of its time with 128.
    "hopper": PrefillConfigs(PrefillConfig(128, 64, 8, 3), PrefillConfig(64, 128, 8, 2), PrefillConfig(128, 64, 8, 2)),
    "hopper, wide": PrefillConfigs(
        PrefillConfig(128, 128, 8, 2), PrefillConfig(64, 128, 8, 2), PrefillConfig(128, 64, 8, 2)
    ),
    "hopper, unaligned": PrefillConfigs(
        PrefillConfig(32, 64, 4, 1), PrefillConfig(32, 32, 4, 1), PrefillConfig(32, 32, 4, 1)
    ),
    "blackwell": PrefillConfigs(PrefillConfig(128, 64, 8, 2), PrefillConfig(32, 64, 4, 2), PrefillConfig(64, 32, 4, 2)),
    "ampere": PrefillConfigs(PrefillConfig(128, 32, 8, 3), PrefillConfig(16, 64, 4, 2), PrefillConfig(64, 16, 4, 2)),
    "small": PrefillConfigs(PrefillConfig(128, 64, 8, 2), PrefillConfig(16, 64, 4, 2), PrefillConfig(64, 16, 4, 2)),
    "other": PrefillConfigs(PrefillConfig(64, 32, 4, 1), PrefillConfig(32, 32, 4, 1), PrefillConfig(32, 32, 4, 1)),
    "interpreter": PrefillConfigs(
        PrefillConfig(32, 16, 1, 1), PrefillConfig(16, 32, 1, 1), PrefillConfig(32, 16, 1, 1)
    ),
}


def choose(gpu: str, width: int, aligned: bool) -> PrefillConfigs:
    """The configurations for rows of q and v padded to ``width`` elements in total. ``aligned``: all rows begin at
    multiples of 16 bytes.
    """
    if gpu == "hopper" and not aligned:
        gpu = "hopper, unaligned"
    elif gpu == "hopper" and width > _TABLE_WIDTH:
        gpu = "hopper, wide"
    configs = TABLE[gpu]
    while width > _TABLE_WIDTH:
        configs = PrefillConfigs(_smaller(configs.forward), _smaller(configs.keys), _smaller(configs.queries))
        width //= 2
    return configs


def _smaller(config: PrefillConfig) -> PrefillConfig:
    block_m, block_n = max(config.block_m // 2, MIN_WIDTH), max(config.block_n // 2, MIN_WIDTH)
    return replace(config, block_m=block_m, block_n=block_n, num_stages=min(config.num_stages, 2))
