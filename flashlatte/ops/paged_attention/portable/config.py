"""Tile sizes for each class of GPUs, limited by registers and shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashlatte.kernels.triton.config import MIN_WIDTH, padded

# The head dims of keys and values, summed, for which the table was measured.
_TABLE_WIDTH = 128 + 128


@dataclass(frozen=True)
class PagedConfig:
    """Sizes of a program's tiles.

    Attributes:
        block_m: query rows: tokens of a request times the query heads per key head.
        block_n: keys of a step.
        num_warps, num_stages: Triton's launch options.
        programs: programs resident on an SM.
        key_heads: key heads per program, if caches are read as words.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 1
    key_heads: int = 1


# By class of GPUs, in ascending order of the average number of rows per request. "small" has 99 KiB of shared memory.
TABLE: dict[str, tuple[PagedConfig, ...]] = {
    "hopper": (PagedConfig(16, 64, 4, 3, programs=2), PagedConfig(64, 64, 4, 3), PagedConfig(128, 128, 8, 2)),
    "blackwell": (PagedConfig(16, 64, 4, 3, programs=2), PagedConfig(64, 64, 4, 3), PagedConfig(128, 64, 8, 2)),
    "ampere": (PagedConfig(16, 64, 4, 3), PagedConfig(64, 64, 4, 2), PagedConfig(128, 32, 8, 3)),
    "small": (PagedConfig(16, 32, 4, 3), PagedConfig(128, 64, 8, 2)),
    "other": (PagedConfig(16, 32, 4, 1), PagedConfig(64, 32, 4, 1)),
    "interpreter": (PagedConfig(16, 16, 1, 1), PagedConfig(32, 16, 1, 1)),
}


# For few query rows over caches of one-byte elements, read as words: a warp per key head.
IN_WORDS: dict[str, tuple[PagedConfig, ...]] = {
    "hopper": (PagedConfig(8, 32, 4, 3, programs=2, key_heads=4), PagedConfig(16, 32, 1, 2, programs=8)),
    "interpreter": (PagedConfig(8, 16, 2, 1, key_heads=2), PagedConfig(16, 16, 1, 1)),
}


def choose_in_words(gpu: str, rows: int, h_kv: int) -> PagedConfig | None:
    """The configuration that reads caches as words for requests of about ``rows`` query rows per key head, or None.

    The number of key heads per program divides ``h_kv``.
    """
    config = next((config for config in IN_WORDS.get(gpu, ()) if rows <= config.block_m), None)
    if config is None:
        return None
    heads = min(config.key_heads, h_kv & -h_kv)
    fewer = config.key_heads // heads
    return replace(config, key_heads=heads, num_warps=config.num_warps // fewer, programs=config.programs * fewer)


def choose(
    gpu: str, rows: int, head_dim: int, head_dim_v: int, *, more_registers: bool, scattered: bool = False
) -> PagedConfig:
    """The configuration for requests of about ``rows`` query rows per key head.

    ``more_registers``: a step needs more registers than for scores, keys and values, such as for biases. ``scattered``:
    the elements of a row are not contiguous, so each has its own address.
    """
    configs = TABLE[gpu]
    config = next((config for config in configs if rows <= config.block_m), configs[-1])
    if more_registers:
        config = replace(config, block_n=max(config.block_n // 2, MIN_WIDTH))
    if scattered and gpu == "hopper":
        # With 128 rows and keys 20 instructions of the loop spill with Triton 3.6, with 16 rows and 64 keys 109.
        config = replace(config, block_n=min(config.block_n, 32), num_warps=8, programs=1)
    width = padded(head_dim) + padded(head_dim_v)
    while width > _TABLE_WIDTH:
        config = replace(
            config,
            block_m=max(config.block_m // 2, MIN_WIDTH),
            block_n=max(config.block_n // 2, MIN_WIDTH),
            num_stages=min(config.num_stages, 2),
            programs=1,
        )
        width //= 2
    if gpu == "hopper" and config == TABLE["hopper"][-1]:
        # If nothing halved it: prefill takes 0.80 (pages of 64) to 0.94 (of 16) of the time with 64 keys.
        config = replace(config, block_n=64, num_stages=3)
    return config
