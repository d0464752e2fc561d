"""Tile configurations of the portable decode and sparse kernels, by GPU class; and widths of tiles, which are powers of
two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from flashlatte.kernels.triton.online_softmax import NVIDIA

# The minimum side of a matrix product in Triton.
MIN_WIDTH = 16
# The largest row width for which the tables' configurations are used unchanged.
_TABLE_WIDTH = 576
# (latent, rope) columns of the tiles that support Hopper's warp groups.
_WARPGROUP_TILES = ((512, 0), (512, 64))


@dataclass(frozen=True)
class AttentionConfig:
    """The tile sizes and compile options of a program.

    Attributes:
        block_h: query rows of a program.
        block_n: keys of a step.
        num_warps: Triton's.
        num_stages: pipeline stages of the loop over keys. 1 does not prefetch. For rows found by indices, 3 prefetches
            indices one step before rows and rows one step before use, and 5 two steps each; for rows found by pages, n
            prefetches rows n - 1 steps.
        warpgroups: arrange the step for Hopper's warp groups (``online_softmax_step``).
        programs: resident programs per SM, limited by registers and shared memory.
        column_sums: keep the sums of P per column of the tile, which saves three barriers per step and needs registers.
        boxes: load tiles of pages by TMA, if the layout of the cache allows it.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    warpgroups: bool = False
    programs: int = 1
    column_sums: bool = True
    boxes: bool = False


class StepConfig(NamedTuple):
    """Constants of a step of the loop over keys.

    Kernels take it as one constexpr. Triton serializes constexprs as JSON, hence a tuple of plain values.

    Attributes:
        head_dim, latent_dim: elements of a row, and of its latent part.
        latent, rope: padded columns of the tiles for the latent part and the rest; ``rope`` is 0 if there is none.
        block_h, block_n, num_stages, warpgroups, column_sums: as in ``AttentionConfig``.
        values_first: the values are [latent, rows] (``online_softmax_step``).
        ptx: the kernel may use inline PTX.
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


# By GPU class: the first configuration that fits all query rows is used, or the last one. Numbers are block_h, block_n,
# num_warps and num_stages.
Table = dict[str, tuple[AttentionConfig, ...]]
INTERPRETER_CONFIGS = (AttentionConfig(16, 16, 1), AttentionConfig(32, 32, 1))

# For rows in q's dtype, found by indices.
SELECTED_ROWS: Table = {
    "hopper": (
        AttentionConfig(16, 64, 4, 3, programs=2),
        AttentionConfig(32, 64, 8, 5),
        AttentionConfig(64, 64, 8, 5, warpgroups=True),
    ),
    "blackwell": (AttentionConfig(16, 64, 4, 3, programs=2), AttentionConfig(32, 64, 8, 5)),
    "ampere": (AttentionConfig(16, 32, 4, 3, programs=2), AttentionConfig(32, 32, 8, 5), AttentionConfig(64, 32, 8, 5)),
    "small": (AttentionConfig(16, 32, 4, 5), AttentionConfig(32, 32, 8, 3)),
    "other": (AttentionConfig(16, 32, 4), AttentionConfig(32, 32, 4)),
    "interpreter": INTERPRETER_CONFIGS,
}


def choose(
    table: Table, gpu: str, rows: int, head_dim: int, latent_dim: int, *, in_place: bool
) -> tuple[AttentionConfig, StepConfig]:
    """Choose the configuration for ``rows`` query rows and cache rows of ``head_dim`` elements, with ``latent_dim``
    value columns.

    ``in_place``: tiles of keys are multiplied as loaded, without conversion in registers.
    """
    latent = padded(latent_dim)
    rope = padded(head_dim - latent_dim) if head_dim > latent_dim else 0
    configs = table[gpu]
    config = next((config for config in configs if rows <= config.block_h), configs[-1])
    if config.warpgroups and (latent, rope) not in _WARPGROUP_TILES:
        config = replace(config, block_n=config.block_n // 2, num_stages=3, warpgroups=False, boxes=False)
    width = latent + rope
    # Each doubling of the width halves the block, to fit registers and shared memory.
    while width > _TABLE_WIDTH:
        stages = min(config.num_stages, 3)
        config = replace(
            config,
            block_h=max(config.block_h // 2, MIN_WIDTH),
            block_n=max(config.block_n // 2, MIN_WIDTH),
            num_stages=stages if config.block_n > MIN_WIDTH else max(stages - 1, 2),
            programs=1,
        )
        width //= 2
    step = StepConfig(
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
    )
    return config, step


def tile_widths(head_dim: int) -> tuple[int, int]:
    """Widths (powers of two) of two tiles that together hold a row of q or k; the second is 0 if one tile is enough."""
    whole = padded(head_dim)
    rest = padded(head_dim - whole // 2)
    return (whole, 0) if whole // 2 < MIN_WIDTH or whole // 2 + rest >= whole else (whole // 2, rest)


def padded(width: int) -> int:
    """The width of a tile for ``width`` columns: a power of two, at least MIN_WIDTH."""
    return max(1 << max(width - 1, 0).bit_length(), MIN_WIDTH)
